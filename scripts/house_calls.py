"""Which function of the package calls which, from its text alone: names, imports, annotations and handed-in functions.

A value is followed through assignments, annotations, fields, returned functions, `functools.partial` and parameters, so
that `term.loss_fn(batch)` leads to the loss function that some reached caller handed in; what the objects made at the top of a
module hold, such as the entries of a table, is known from the start. What cannot be followed (a parameter of type Any, a
dictionary of functions) leads nowhere. One thing is known beforehand: the function that looks a
stage up by name (it calls `import_module`) returns the `run` of the stage's module.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from house_code import Class, Function, FunctionNode, Instance, Module, Package, Value, own_nodes


class Calls:
    """The calls reached from one function, `edges`: caller -> called functions, in names.

    Args:
        start: name of the function to start from.
        stage: name of the function that a look-up by name returns.
    """

    def __init__(self, package: Package, start: str, stage: str):
        self.package, self.start, self.stage = package, start, stage
        self.edges: dict[str, set[str]] = {}
        self.slots: dict[tuple[str, str], set[Value]] = defaultdict(set)  # (function or class, parameter) -> values
        self._known: dict[tuple[int, str], set[Value]] = {}
        self._open: set[tuple[int, str]] = set()
        self._locals: dict[str, dict[str, list[ast.expr]]] = {}
        self._fields: dict[str, list[tuple[str, ast.expr, Function]]] = {}
        for module in package.modules.values():
            self._hand_in_at_the_top(module)
        before = -1
        while before != (before := self._size()):  # values handed in reach functions whose calls hand in values
            self._known.clear()
            self.edges, todo = {}, [start]
            while todo:
                name = todo.pop()
                if name not in self.edges:
                    self.edges[name] = self._targets(self.package.functions[name])
                    todo.extend(self.edges[name])

    def _hand_in_at_the_top(self, module: Module) -> None:
        """Keep the functions that objects made at the top of a module are handed."""
        made = [line.value for line in module.tree.body if isinstance(line, ast.Assign | ast.AnnAssign) and line.value]
        for call in (node for value in made for node in ast.walk(value) if isinstance(node, ast.Call)):
            made_of = self.package.lookup(module.name, call.func.id) if isinstance(call.func, ast.Name) else None
            if isinstance(made_of, Class):
                several = [*zip(fields_of(made_of.node), call.args, strict=False)]
                for name, value in [*several, *((keyword.arg or "", keyword.value) for keyword in call.keywords)]:
                    held = self.package.lookup(module.name, value.id) if isinstance(value, ast.Name) else None
                    self.slots[made_of.name, name] |= {held} if isinstance(held, Function) else set()

    def _size(self) -> int:
        return sum(map(len, self.slots.values())) + sum(map(len, self.edges.values()))

    def path(self, end: str) -> list[str]:
        """A shortest chain of calls from the start, both ends included; [] where there is none."""
        trails, seen = [[self.start]], {self.start}
        for trail in trails:
            if trail[-1] == end:
                return trail
            for target in sorted(self.edges.get(trail[-1], set()) - seen):
                seen.add(target)
                trails.append([*trail, target])
        return []

    def around(self, names: Iterable[str], depth: int) -> set[str]:
        """These functions, what they call on every run, what that calls on every run, and so on, `depth` calls deep."""
        found = set(names)
        for _ in range(depth):
            found |= {name for one in found for name in self._targets(self.package.functions[one], always=True)}
        return found

    # What one function calls

    def _targets(self, function: Function, always: bool = False) -> set[str]:
        found: set[Value] = set()
        for node in own_nodes(function, always):
            if isinstance(node, ast.Call):
                for callee in self.values(node.func, function):
                    found |= set(self._entered(callee))
                    self._hand_in(callee, node, function)
            elif isinstance(node, ast.Attribute | ast.Name):
                found |= {value for value in self.values(node, function, as_method=True) if self._is_property(value)}
        return {value.name for value in found if isinstance(value, Function)}

    def _is_property(self, value: Value) -> bool:
        return isinstance(value, Function) and bool(decorators(value.node) & {"property", "cached_property"})

    def _entered(self, callee: Value) -> Iterator[Value]:
        """The functions that run when a value is called."""
        if isinstance(callee, Function):
            yield callee
        elif isinstance(callee, Class):
            for name in ("__init__", "__post_init__", "__enter__"):
                yield from self._methods(callee, name)
        elif isinstance(callee, Instance):
            yield from self._methods(callee.of, "__call__") or self._methods(callee.of, "forward")

    def _hand_in(self, callee: Value, call: ast.Call, function: Function) -> None:
        """Keep functions and objects among the arguments of a call under the parameters that they are handed to."""
        if isinstance(callee, Class):
            owner, names = callee.name, fields_of(callee.node)
            if inits := self._methods(callee, "__init__"):
                owner, names = inits[0].name, parameters(inits[0].node)[1:]
        elif isinstance(callee, Function):
            owner, names = callee.name, parameters(callee.node)
            names = names[1:] if callee.owner is not None and "staticmethod" not in decorators(callee.node) else names
        else:
            return
        for name, value in [*zip(names, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)]:
            if not isinstance(value, ast.Constant):
                self.slots[owner, name] |= self.values(value, function)

    # What an expression may be

    def values(self, node: ast.AST | None, function: Function, as_method: bool = False) -> set[Value]:
        """Modules, functions, classes and objects of the package that an expression may stand for."""
        key = (id(node), function.name + str(as_method))
        if key in self._open or node is None:
            return set()
        if key not in self._known:
            self._open.add(key)
            self._known[key] = self._evaluate(node, function, as_method)
            self._open.discard(key)
        return self._known[key]

    def _evaluate(self, node: ast.AST, function: Function, as_method: bool) -> set[Value]:
        match node:
            case ast.Name(id=name):
                return self._name(name, function)
            case ast.Attribute(value=base, attr=attr):
                return set().union(*(self._attribute(value, attr, as_method) for value in self.values(base, function)))
            case ast.Call(func=called, args=args):
                if isinstance(called, ast.Name) and called.id == "partial" and args:
                    return self.values(args[0], function)
                if isinstance(called, ast.Name) and called.id in ("zip", "enumerate"):
                    return set().union(*(self.values(value, function) for value in args))
                if isinstance(called, ast.Name) and called.id == "super" and function.owner is not None:
                    return {Instance(base) for base in self._bases(function.owner)}
                return set().union(*(self._returned(value) for value in self.values(called, function)))
            case ast.IfExp(body=first, orelse=second):
                return self.values(first, function) | self.values(second, function)
            case ast.BoolOp(values=several) | ast.Tuple(elts=several) | ast.List(elts=several):
                return set().union(*(self.values(value, function) for value in several))
            case ast.NamedExpr(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
                return self.values(inner, function)
        return set()

    def _name(self, name: str, function: Function | None) -> set[Value]:
        while function is not None:
            if name in ("self", "cls") and function.owner is not None:
                return {Instance(function.owner)}
            inside = self.package.functions.get(f"{function.name}.{name}")
            if inside is not None:
                return {inside}
            if name in parameters(function.node):
                annotated = self._annotated(annotation_of(function.node, name), function.module)
                return self.slots[function.name, name] | annotated
            if name in self._assigned(function):
                return set().union(*(self.values(value, function) for value in self._assigned(function)[name]))
            if function.outer is None:
                break
            function = function.outer
        found = self.package.lookup(function.module.name, name) if function is not None else None
        return set() if found is None else {found}

    def _assigned(self, function: Function) -> dict[str, list[ast.expr]]:
        """Local name -> what is assigned to it: `=`, `:=`, `with ... as`, `for ... in`."""
        if function.name not in self._locals:
            names = self._locals[function.name] = {}
            for node in own_nodes(function):
                for target, value in bound_pairs(node):
                    for part in ast.walk(target):
                        if isinstance(part, ast.Name):
                            names.setdefault(part.id, []).append(value)
        return self._locals[function.name]

    def _attribute(self, value: Value, attr: str, as_method: bool) -> set[Value]:
        if isinstance(value, Module):
            found = self.package.lookup(value.name, attr)
            return set() if found is None else {found}
        if not isinstance(value, Instance | Class):
            return set()
        owner = value.of if isinstance(value, Instance) else value
        methods = self._methods(owner, attr)
        if methods and self._is_property(methods[0]) and not as_method:
            return set().union(*(self._returned(method) for method in methods))
        return set(methods) or self._field(owner, attr)

    def _field(self, owner: Class, attr: str) -> set[Value]:
        """What an object's field may hold: what was handed in, its annotation, what methods assign to it."""
        found = set(self.slots[owner.name, attr])
        for line in owner.node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == attr:
                found |= self._annotated(line.annotation, owner.module)
        for name, value, method in self._own_fields(owner):
            found |= self.values(value, method) if name == attr else set()
        return found.union(*(self._field(base, attr) for base in self._bases(owner)))

    def _own_fields(self, owner: Class) -> list[tuple[str, ast.expr, Function]]:
        """Name, value and method of each `self.name = value`."""
        if owner.name not in self._fields:
            found = self._fields[owner.name] = []
            for method in self.package.methods.get(owner.name, []):
                for target, value in (pair for node in own_nodes(method) for pair in bound_pairs(node)):
                    found += [(name, value, method) for name in own_names(target)]
        return self._fields[owner.name]

    def _bases(self, owner: Class) -> list[Class]:
        found = [self._annotated(base, owner.module) for base in owner.node.bases]
        return [value.of for values in found for value in values if isinstance(value, Instance)]

    def _methods(self, owner: Class, name: str) -> list[Function]:
        """The method of a class or of the nearest class above it."""
        own = self.package.functions.get(f"{owner.name}.{name}")
        return [own] if own else [method for base in self._bases(owner) for method in self._methods(base, name)]

    def _returned(self, callee: Value) -> set[Value]:
        """What a call of a value gives."""
        if isinstance(callee, Class):
            return {Instance(callee)}
        if not isinstance(callee, Function):
            return set()
        found = self._annotated(callee.node.returns, callee.module)
        for node in own_nodes(callee):
            if isinstance(node, ast.Return | ast.Yield):
                found |= self.values(node.value, callee)
        return found | {self.package.functions[self.stage]} if looks_up_by_name(callee) else found

    def _annotated(self, node: ast.AST | None, module: Module) -> set[Value]:
        """Objects of every class of the package that an annotation names, `list[Policy] | None` a Policy."""
        found: set[Value] = set()
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
                part = ast.Name(part.value)
            if isinstance(part, ast.Name):
                value = self.package.lookup(module.name, part.id)
                found |= {Instance(value)} if isinstance(value, Class) else set()
        return found


def looks_up_by_name(function: Function) -> bool:
    """Whether a function imports a module by a name made at run time."""
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in own_nodes(function)}
    return "import_module" in names


def decorators(node: FunctionNode) -> set[str]:
    """Last names of a function's decorators: `functools.cached_property` is `cached_property`."""
    plain = (item.func if isinstance(item, ast.Call) else item for item in node.decorator_list)
    return {item.attr if isinstance(item, ast.Attribute) else getattr(item, "id", "") for item in plain}


def parameters(node: FunctionNode) -> list[str]:
    """Names of a function's parameters in order."""
    several = [] if node.args.vararg is None else [node.args.vararg]
    return [item.arg for item in (*node.args.posonlyargs, *node.args.args, *several, *node.args.kwonlyargs)]


def annotation_of(node: FunctionNode, name: str) -> ast.AST | None:
    """The annotation of a parameter."""
    several = [] if node.args.vararg is None else [node.args.vararg]
    every = (*node.args.posonlyargs, *node.args.args, *several, *node.args.kwonlyargs)
    return next((item.annotation for item in every if item.arg == name), None)


def fields_of(node: ast.ClassDef) -> list[str]:
    """Names of a dataclass's fields in order."""
    targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def own_names(target: ast.AST) -> list[str]:
    """The x of each `self.x` in an assignment's target."""
    parts = [part for part in ast.walk(target) if isinstance(part, ast.Attribute)]
    return [part.attr for part in parts if isinstance(part.value, ast.Name) and part.value.id == "self"]


def bound_pairs(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Targets and values that a statement binds."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
