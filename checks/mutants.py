"""Counts how many small mistakes, put into the library one at a time, its tests find.

    python -m checks.mutants            # an hour on two cores; a stopped run continues
    python -m checks.mutants --again    # the survivors only, once a test was added
    python -m checks.mutants --quick    # five of them; writes nothing

It draws a seeded sample of single changes (a comparison, a sign, a constant, a swapped branch, a
lost mask) to kernels, approximations, caches, error and masking. Each is run against only the tests
of its file (checks/mutants.yaml) until one fails. Nothing on disk is changed: a forked process
reads the changed source in place of the file. Outcomes are appended to --outcomes as they come.
Writes results/benchmarks/mutants.json and .md.
"""

import ast
import json
import os
import resource
import signal
import sys
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from hashlib import sha256
from importlib import import_module
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

SAMPLE, SEED = 200, 0
SECONDS, MEMORY = 300, 12 * 2**30
"""Limits of CPU seconds and bytes; a mutant that exceeds one, as in an endless loop, is killed."""
SOURCES = Path("src/value_aware_attention")
PRELOADED = (
    *("numpy", "scipy.optimize", "torch", "beartype"),
    *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
    *("hypothesis.strategies", "jaxtyping", "hydra.utils"),
)
"""Modules of other packages that the tests import, once for all forks."""
OPERATORS: dict[type, tuple[type, ...]] = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt)},
    **{ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,)},
    **{ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,)},
    **{ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,)},
}
PAIRS = (
    *(("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum")),
    *(("any", "all"), ("floor", "ceil"), ("tril", "triu"), ("clamp_min", "clamp_max")),
    *(("sum", "mean"), ("new_zeros", "new_ones"), ("zeros", "ones")),
)
NAMES = dict(PAIRS) | {other: one for one, other in PAIRS}
REMOVED = {
    *("clamp", "clamp_min", "clamp_max", "masked_fill", "where", "nan_to_num", "abs", "square"),
    *("sqrt", "rsqrt", "exp", "log", "double", "float", "detach", "cumsum", "flip", "roll"),
}
"""Calls that a mutant drops; `torch.where` has its branches swapped instead."""
LEFT_OUT = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
NO_CODE = ("annotation", "returns", "decorator_list")
Change = tuple[str, Any, str]
"""Operator, the changed node, its new text."""


@dataclass(frozen=True)
class Mutant:
    """Describes one change of a file."""

    file: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    start: int
    end: int
    """First byte of `before` and the byte after its last."""
    number: int
    """Index among equal changes of one function."""

    @property
    def name(self) -> str:
        """Identifies the mutant, also after lines have moved."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.file} {self.function}: {self.before} -> {self.after}{again}"

    def source(self) -> bytes:
        """Returns the text of its file with the change in it."""
        text = (SOURCES / self.file).read_bytes()
        after = self.after if self.operator == "statement" else f"({self.after})"
        return text[: self.start] + after.encode() + text[self.end :]


def mutants(file: str) -> Iterator[Mutant]:
    """Yields every change of a file that its tests should see.

    Left out are docstrings, annotations, decorators, imports, and `raise` with its text.
    """
    text = (SOURCES / file).read_bytes()
    begins = list(accumulate(map(len, text.splitlines(keepends=True)), initial=0))
    equal: Counter[tuple[str, ...]] = Counter()
    for function, node in _code(ast.parse(text), ""):
        for operator, old, after in changes(node):
            start = begins[old.lineno - 1] + old.col_offset
            end = begins[old.end_lineno - 1] + old.end_col_offset
            key = function, ast.unparse(old), after
            place = old.lineno, *key[1:], start, end, equal[key]
            equal[key] += 1
            yield Mutant(file, function, operator, *place)


def _code(node: ast.AST, function: str) -> Iterator[tuple[str, Any]]:
    """Yields function and node of all code that runs, parents first."""
    if isinstance(node, LEFT_OUT):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    yield function, node
    for name, inner in ast.iter_fields(node):
        for item in inner if isinstance(inner, list) else [inner]:
            if isinstance(item, ast.AST) and name not in NO_CODE:
                yield from _code(item, function)


def _with(node: Any, operator: str, **fields: Any) -> Change:
    new = copy(node)
    vars(new).update(fields)
    return operator, node, ast.unparse(new)


def changes(node: Any) -> Iterator[Change]:
    """Yields the changes of one node, or of its condition."""
    yield from _operators(node)
    yield from _values(node)
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, "branches", body=orelse, orelse=body)
        case ast.If(test=test) | ast.While(test=test):
            yield "branches", test, f"not ({ast.unparse(test)})"
        case ast.Expr(value=ast.Call()):
            yield "statement", node, "pass"
        case ast.Call():
            yield from _calls(node)


def _operators(node: Any) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[op]):
            others = OPERATORS[type(op)]
            yield from (_with(node, "comparison", ops=[other()]) for other in others)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op):
            name = "statement" if isinstance(node, ast.AugAssign) else "arithmetic"
            others = OPERATORS.get(type(op), ())
            yield from (_with(node, name, op=other()) for other in others)
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign or negation", node, ast.unparse(operand)


def _values(node: Any) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool() as value):
            yield "constant", node, repr(not value)
        case ast.Constant(value=int() as value):
            yield "constant", node, repr(value + 1)  # dim=-1 becomes dim=-2 too
        case ast.Constant(value=float() as value):
            yield "constant", node, repr(2 * value or 1.0)
        case ast.Attribute(attr=name) if name in NAMES:
            yield _with(node, "reduction", attr=NAMES[name])
        case ast.Name(id=name) if name in NAMES:
            yield _with(node, "reduction", id=NAMES[name])


def _calls(node: ast.Call) -> Iterator[Change]:
    """Yields a call without one of its keywords, without itself, or with its branches swapped."""
    for keyword in node.keywords:
        if keyword.arg not in (None, "device"):  # a device is held by tests on another one
            rest = [other for other in node.keywords if other is not keyword]
            yield _with(node, "keyword", keywords=rest)
    if isinstance(node.func, ast.Attribute):
        of_torch = ast.unparse(node.func.value) == "torch"
        if of_torch and node.func.attr == "where":
            test, *branches = node.args
            yield _with(node, "branches", args=[test, *reversed(branches)])
        elif node.func.attr in REMOVED:
            yield "call", node, ast.unparse(node.args[0] if of_torch else node.func.value)


def tests_of(file: str) -> tuple[str, ...]:
    """Returns the tests of a file; () for a file that is not mutated."""
    matching = (tests for pattern, tests in TABLE["tests"].items() if fnmatch(file, pattern))
    return tuple(next(matching, ()))


def sample(count: int) -> list[Mutant]:
    """Draws the mutants whose names hash lowest: a change of one file leaves other draws alone."""
    files = (str(file.relative_to(SOURCES)) for file in SOURCES.rglob("*.py"))
    drawable = (mutant for file in files if tests_of(file) for mutant in mutants(file))
    return sorted(drawable, key=lambda x: sha256(f"{SEED} {x.name}".encode()).digest())[:count]


class _FirstFailure:
    """Remembers the test that ended a run."""

    name = ""

    def pytest_sessionstart(self) -> None:
        """Draws the same examples: no limit of time, and no search for the smallest that fails."""
        from hypothesis import HealthCheck, Phase, settings

        options: dict[str, Any] = {"phases": (Phase.explicit, Phase.generate), "deadline": None}
        options["suppress_health_check"] = [HealthCheck.too_slow]
        settings.register_profile("mutants", settings.default, **options)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remembers the first test that failed in setup, call or end."""
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remembers a file of tests whose import failed."""
        if report.failed:
            self.name = self.name or "import"


def _read_as(mutant: Mutant) -> None:
    """Lets later imports read a mutant's file with its change in it."""
    path, text = str((SOURCES / mutant.file).resolve()), mutant.source()
    read, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(self: SourceFileLoader, asked: str) -> bytes:
        return text if asked == path else read(self, asked)

    def path_stats(self: SourceFileLoader, asked: str) -> Mapping[str, Any]:
        if asked == path:
            raise OSError("so that neither is the file's compiled code read, nor ours kept as it")
        return stats(self, asked)

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]


def fork(tests: Iterable[str], mutant: Mutant | None = None) -> tuple[int, int]:
    """Runs tests in a fork until one fails; returns its number and the pipe of its answer."""
    answer, end = os.pipe()
    if child := os.fork():
        os.close(end)
        return child, answer
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(20 * SECONDS)  # wall-clock time: a process that waits for ever takes no CPU
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    if mutant is not None:
        _read_as(mutant)
    first = _FirstFailure()
    # Assertions stay plain: to rewrite them, pytest would have to be the first to import plugins.
    options = ("-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow")
    code = pytest.main([*options, *tests], plugins=[first])
    os.write(end, json.dumps([int(code), first.name]).encode())
    os._exit(0)


def killer(answer: int) -> str:
    """Returns the test that failed, "" if none did, "died" for a process without an answer."""
    with os.fdopen(answer) as end:
        code, name = json.loads(end.read() or '[-1, "died"]')
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(
            f"error: pytest ran no tests and ended with {code}; where a test was renamed since it "
            "killed a mutant, remove its lines from --outcomes"
        )
    return name if code else ""


def run(chosen: Sequence[Mutant], outcomes: Path, workers: int) -> None:
    """Runs mutants in processes, `workers` at a time, and appends what killed each to a file."""
    running: dict[int, tuple[Mutant, int]] = {}
    waiting = list(reversed(chosen))
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            child, answer = fork([f"tests/{test}" for test in tests_of(mutant.file)], mutant)
            running[child] = mutant, answer
        mutant, answer = running.pop(os.wait()[0])
        outcome = {"name": mutant.name, "killed_by": killer(answer)}
        with outcomes.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        print(f"{outcome['killed_by'] or 'SURVIVED'}: {mutant.name}", flush=True)


def check(killers: Iterable[str]) -> None:
    """Ends the program unless the tests that killed a mutant pass without it."""
    tests = sorted({test for test in killers if "::" in test})
    if not tests:
        return
    child, answer = fork(tests)
    os.waitpid(child, 0)
    if failed := killer(answer):
        raise SystemExit(f"error: {failed} fails without any change")


def known(outcomes: Path) -> dict[str, list[str]]:
    """Reads the killers of every mutant by name, one for each of its runs."""
    killers: dict[str, list[str]] = {}
    for line in outcomes.read_text().splitlines() if outcomes.exists() else ():
        outcome = json.loads(line)
        killers.setdefault(outcome["name"], []).append(outcome["killed_by"])
    return killers


def main() -> None:
    """Runs the mutants that have no outcome yet; prints and writes the page, but for --quick."""
    arguments = _given()
    chosen = sample(5 if arguments.quick else arguments.sample)
    arguments.outcomes.parent.mkdir(parents=True, exist_ok=True)
    done = {
        name
        for name, killed in known(arguments.outcomes).items()
        if killed[-1] or not arguments.again
    }
    for name in PRELOADED:
        import_module(name)
    if "value_aware_attention" in sys.modules:
        raise SystemExit("error: the library is imported; a mutant must be read in place of it")
    run(
        [mutant for mutant in chosen if mutant.name not in done],
        arguments.outcomes,
        arguments.workers,
    )
    killers = known(arguments.outcomes)
    check(killers[mutant.name][-1] for mutant in chosen)
    _write(
        [asdict(mutant) | outcome(mutant.name, killers[mutant.name]) for mutant in chosen],
        not arguments.quick,
    )


def _given() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five of them; writes nothing")
    parser.add_argument("--again", action="store_true", help="run what survived once more")
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"mutants; {SAMPLE} without it")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--outcomes", type=Path, default=Path(".cache/mutants.jsonl"))
    return parser.parse_args()


def outcome(name: str, killed_by: Sequence[str]) -> dict[str, Any]:
    """Returns a record's outcome of a mutant."""
    why = TABLE["explained"].get(name, "")
    return {"killed_by": killed_by[-1], "survived_at_first": not killed_by[0], "why": why}


def _write(outcomes: list[dict[str, Any]], keep: bool) -> None:
    # These import the library, which the mutants' processes have to do first.
    from benchmarks.record import finish
    from checks import mutants_page

    record = mutants_page.record(SEED, outcomes)
    finish("mutants", record, mutants_page.page(record), keep=keep)


TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

if __name__ == "__main__":
    main()
