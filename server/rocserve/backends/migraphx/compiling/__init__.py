"""From a model's file and its configuration to compiled programs, in the cache. Nothing here serves."""
