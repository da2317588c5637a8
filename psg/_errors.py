"""The errors and the one warning that psg raises on its own account."""


class PsgError(Exception):
    """Base class of every error that psg raises on its own account.

    An error inside the user's function is never wrapped in one: it is raised as it is.
    """


class InputError(PsgError, ValueError):
    """An argument does not fit. The message names it, what arrived, what was expected and what to do."""


class StateError(PsgError, RuntimeError):
    """The function changes state or mixes samples, so that one sample's gradient is not defined by that sample."""


class FallbackWarning(UserWarning):
    """A call went down the ladder (capture, vmap, loop): the result is right and the call is slower. Says why."""
