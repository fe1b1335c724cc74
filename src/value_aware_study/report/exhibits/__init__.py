"""Everything that the report shows: an exhibit a file, with its words, numbers and drawing."""
