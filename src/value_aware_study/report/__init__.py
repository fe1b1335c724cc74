"""The report of a run as one page: records, exhibits that answer questions, and their order."""
