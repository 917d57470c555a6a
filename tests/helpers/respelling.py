"""Code of pages, which call the cache's argument as the newest transformers does, for versions that do not."""

import ast

from kvlayers.upstream import cache_argument

NEWEST = "cache"


class _Respelling(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not ast.unparse(node.func).startswith("kvlayers."):
            for keyword in node.keywords:
                keyword.arg = self.name if keyword.arg == NEWEST else keyword.arg
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == NEWEST and ast.unparse(node.value) == "output":
            node.attr = self.name
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Arguments by their names, as `torch.export` takes them."""
        self.generic_visit(node)
        keys = [key for key in node.keys if isinstance(key, ast.Constant)]
        if any(key.value == "input_ids" for key in keys):
            for key in keys:
                key.value = self.name if key.value == NEWEST else key.value
        return node


def respelled(code: str) -> str:
    """Code for the installed transformers; the same code if this is a version that it was written for."""
    name = cache_argument.usual_name()
    return code if name == NEWEST else ast.unparse(_Respelling(name).visit(ast.parse(code)))
