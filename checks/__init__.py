"""Holds suites that look for mistakes: python -m checks.<name>.

`kills` kills running stages, `mutants` puts mistakes into the library, and `golden` compares the
numbers of every stage with those of an earlier run. `values` is a table for tests.
"""

import pipelines  # noqa: F401 -- it names the successors of commands that are gone
