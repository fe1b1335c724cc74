"""Language-modelling tasks of the paper, and what needs no attention on the same targets."""
