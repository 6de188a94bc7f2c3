"""The one exception for what a user can mend."""


class UserError(Exception):
    """A mistake outside the code: the message is one line that says what, where, and what to do."""


class LostPeerError(UserError):
    """Another process of the same run has ended: its own error says why, this one only that it was noticed."""


def one_line(error: Exception) -> str:
    """What a user reads of an error: its text, with its type unless it is a mistake that we have words for."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
