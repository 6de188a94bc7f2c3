"""The one exception for what a user can mend."""


class UserError(Exception):
    """A mistake outside the code: the message is one line that says what, where, and what to do."""
