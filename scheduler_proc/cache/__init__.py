"""Pages of KV and who owns them: free list, prefix cache, rows."""
