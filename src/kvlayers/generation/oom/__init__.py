"""Generation that survives running out of memory: the ladder of caches, the attempts, and how one resumes another."""
