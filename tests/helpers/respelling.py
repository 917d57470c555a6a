"""Code of pages, which call the cache's argument as the newest transformers does, for versions that do not."""

import ast

from kvlayers.upstream import cache_argument

NEWEST = "cache"


def respelled(code: str) -> str:
    """Code for the installed transformers; the same code if this is a version that it was written for."""
    name = cache_argument.usual_name()
    if name == NEWEST:
        return code
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("kvlayers."):
            for keyword in node.keywords:
                keyword.arg = name if keyword.arg == NEWEST else keyword.arg
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"output.{NEWEST}":
            node.attr = name
        elif isinstance(node, ast.Dict):
            # Arguments by their names, as `torch.export` takes them.
            keys = {key.value: key for key in node.keys if isinstance(key, ast.Constant)}
            if "input_ids" in keys and NEWEST in keys:
                keys[NEWEST].value = name
    return ast.unparse(tree)
