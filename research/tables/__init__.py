"""Tables and pictures of the docs, made by running headwise."""
