"""Decodes with compressed key-value caches, on top of the cache methods and the adapter.

Its public names are `caches.AfterPrefix`, `hugging_face.compressed_cache`,
`hugging_face.CompressedGeneration` and `hugging_face.check_cache`.
"""
