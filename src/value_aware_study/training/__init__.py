"""Training: Lightning modules, a loop that can be killed, optimizers (appendix A)."""
