"""A process group of one for every test of an engine."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def process_group():
    from torch.distributed import HashStore

    from attention_ablation.training.world import ALONE, start_process_group

    start_process_group(ALONE, HashStore(), minutes=1)
