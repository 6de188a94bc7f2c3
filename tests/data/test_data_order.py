import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.data.order import permute, read_batch, window_count, windows_of_step
from attention_ablation.data.stream import TokenStream
from attention_ablation.errors import UserError


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_window_once_an_epoch(windows, seed, epoch):
    order = permute(np.arange(windows), windows=windows, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(windows))


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 5))
def test_the_sequence_of_windows_does_not_depend_on_the_batch(windows, batch, seed):
    length = 120
    one_by_one = [windows_of_step(step, windows=windows, batch=1, seed=seed)[0] for step in range(length)]
    steps = [windows_of_step(step, windows=windows, batch=batch, seed=seed) for step in range(-(-length // batch))]
    assert np.concatenate(steps)[:length].tolist() == one_by_one
    epochs = [one_by_one[start : start + windows] for start in range(0, length - windows, windows)]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)


@pytest.mark.parametrize("windows", [2, 3, 7, 10, 64])
def test_every_window_is_as_likely_at_every_position(windows):
    epochs = 2000
    orders = np.stack([permute(np.arange(windows), windows=windows, seed=1, epoch=e) for e in range(epochs)])
    counts = np.stack([(orders == window).sum(axis=0) for window in range(windows)])
    expected = epochs / windows
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_neighbours_in_the_text_are_not_neighbours_in_the_order():
    order = permute(np.arange(100_000), windows=100_000, seed=0, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_the_order_is_the_one_it_has_always_been():
    # Changing this changes every training: resumed runs would mix two orders.
    assert windows_of_step(3, windows=1000, batch=4, seed=5).tolist() == [394, 715, 135, 324]


def test_a_corpus_of_billions_of_windows_costs_no_more():
    numbers = windows_of_step(10**7, windows=10**12, batch=1000, seed=0)
    assert len(set(numbers.tolist())) == 1000
    assert numbers.min() >= 0 and numbers.max() < 10**12


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 50))
def test_a_window_needs_a_successor_for_each_of_its_tokens(tokens, context):
    count = window_count(tokens, context)
    assert count * context + 1 <= tokens or count == 0
    assert (count + 1) * context + 1 > tokens


def test_no_window_at_all_is_told():
    with pytest.raises(UserError, match="shorter than one window"):
        windows_of_step(0, windows=0, batch=1, seed=0)


def test_batches_hold_the_tokens_and_their_successors_across_parts(tmp_path, make, prose):
    stream = TokenStream.open(make(tmp_path, [prose[:300], prose[300:420], prose[420:800]], parts=3).dataset)
    offset, context = 11, 16
    windows = window_count(stream.length - offset, context)
    inputs, targets = read_batch(stream, np.arange(windows), offset=offset, context=context)
    tokens = stream.read(0, stream.length).astype(np.int64)
    assert inputs.dtype == targets.dtype == np.int64
    assert (inputs.ravel() == tokens[offset : offset + windows * context]).all()
    assert (targets.ravel() == tokens[offset + 1 : offset + 1 + windows * context]).all()
