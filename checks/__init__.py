"""Suites that look for mistakes: python -m checks.<name>.

`kills` kills running stages, `values` gives wrong values to the apps, `mutants` puts mistakes
into the library, and `golden` compares the numbers of every stage with those of an earlier run;
`stamp` then enters today's code as that of the published trainings.
"""
