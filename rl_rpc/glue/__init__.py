"""The glue: what a real job needs around the story."""
