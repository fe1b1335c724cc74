"""Decodes with compressed key-value caches: the room above the cache methods and the adapter.

Its names are offered where users look for them: `caches.AfterPrefix`,
`hugging_face.compressed_cache`, `hugging_face.CompressedGeneration`, `hugging_face.check_cache`.
"""
