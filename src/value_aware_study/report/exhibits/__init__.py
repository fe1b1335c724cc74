"""All exhibits of the report: one per file, with its words, numbers and drawing."""
