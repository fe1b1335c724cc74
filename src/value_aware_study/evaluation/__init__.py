"""Evaluation of trained models: grids of approximations, equal budgets, and baselines."""
