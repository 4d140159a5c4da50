"""From a model in memory to a published version: walk, merge out of place, write."""
