"""The page pool: references, eviction order, page-table rows."""
