"""The functional core: declarations, ids, placement, lookup, update; pure below the engine."""
