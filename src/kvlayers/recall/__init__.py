"""Keeps every token; a query reads the pages whose bounds promise most (Quest)."""
