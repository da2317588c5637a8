"""What Python 3.12 and later do otherwise than the version that the tests run with."""

import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import psg

_COMPREHENSIONS = {"listcomp", "dictcomp", "setcomp"}


def hidden(scope: symtable.SymbolTable) -> Iterator[tuple[str, int, str]]:
    """The variables of comprehensions that hide one which the function around reads from a function around itself."""
    for inner in scope.get_children():
        if isinstance(scope, symtable.Function) and isinstance(inner, symtable.Function) and inner.get_name() in _COMPREHENSIONS:
            for name in {*inner.get_locals()} & {*scope.get_frees()}:
                yield scope.get_name(), scope.get_lineno(), name
        yield from hidden(inner)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="symbol tables show no scope for comprehensions; there the other tests tell")
def test_no_comprehension_hides_a_closed_over_variable():
    """Python 3.12 and 3.13 run comprehensions in the function's own frame, and such a variable has no value afterwards (a NameError)."""
    example = "def f(x):\n def g():\n  y = [x for x in ()]\n  return lambda: x, y\n"
    assert [*hidden(symtable.symtable(example, "", "exec"))] == [("g", 2, "x")]
    files = [*Path(psg.__file__).parent.rglob("*.py")]
    assert files
    found = [(path.name, *own) for path in files for own in hidden(symtable.symtable(path.read_text("utf-8"), str(path), "exec"))]
    assert not found
