"""Rules: fast paths for known ops. One file an op family: formula and source, then the rule."""

from psg.rules import activation, attention, conv, embedding, leaks, linear, loss, missing, normalization, products, recurrent, repairs  # noqa: F401
from psg.rules._registry import disabled, primitive, registered, rule

__all__ = ["disabled", "primitive", "registered", "rule"]
