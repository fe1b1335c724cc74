"""Text to batches: corpora -> tokens -> sequences -> masks (A.1)."""
