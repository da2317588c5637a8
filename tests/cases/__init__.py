"""One table of cases, shared by all tests; one file a family of rows."""

from cases import arguments, derived, ladder, models, rules, state
from cases._table import CASES, Case, N, Problem, case, each_case, falling, ids, normal, parameters, score
from cases.models import Tied, convnet

__all__ = [
    "CASES",
    "N",
    "Case",
    "Problem",
    "Tied",
    "arguments",
    "case",
    "convnet",
    "derived",
    "each_case",
    "falling",
    "ids",
    "ladder",
    "models",
    "normal",
    "parameters",
    "rules",
    "score",
    "state",
]
