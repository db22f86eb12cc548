"""Code that is run against tests: ordinary right answers pass, and answers that look for a way round the tests do not."""

import json
import sys
import time

import pytest

from alignment.rewards import code as code_module
from alignment.rewards.code import extract_code
from alignment.rewards.sandbox import SandboxLimits, passes
from tests.conftest import DATA

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux's")

LIMITS = SandboxLimits(cpu_seconds=2, wall_seconds=5, memory_megabytes=256)
NUMBERS = "assert f(2) == 5 and f(3) == 7"
PAIR = """
class Pair:
    def __init__(self, left, right): self.left, self.right = left, right
    def __add__(self, o): return Pair(self.left + o.left, self.right + o.right)
    def __eq__(self, o): return (self.left, self.right) == (o.left, o.right)
    def __lt__(self, o): return self.left < o.left
    def __repr__(self): return f'Pair({self.left}, {self.right})'
    def __contains__(self, x): return x in (self.left, self.right)
    def __enter__(self): return self
    def __exit__(self, *error): return False
"""

RIGHT = {
    "operator": (
        PAIR,
        ("s = Pair(1, 2) + Pair(5, 6)\nassert (s.left, s.right) == (6, 8)"),
    ),
    "equal objects": (
        PAIR,
        "assert Pair(1, 2) == Pair(1, 2) and Pair(1, 2) != Pair(2, 1)",
    ),
    "repr and format": (
        PAIR,
        "assert repr(Pair(1, 2)) == 'Pair(1, 2)' == f'{Pair(1, 2)}' == str(Pair(1, 2))",
    ),
    "isinstance": (
        PAIR,
        "assert isinstance(Pair(1, 2), Pair) and not isinstance(3, Pair) and not isinstance(Pair(1, 2), int)",
    ),
    "attribute is set": (
        PAIR,
        ("p = Pair(1, 2)\np.left = 9\nassert p.left == 9 and Pair(9, 2) == p"),
    ),
    "with and in": (
        PAIR,
        ("with Pair(1, 2) as p:\n    assert p.left == 1 and 2 in p and 3 not in p"),
    ),
    "sorted objects": (
        PAIR,
        "assert [p.left for p in sorted([Pair(5, 0), Pair(2, 0), Pair(3, 0)])] == [2, 3, 5]",
    ),
    "next": (
        ("def evens():\n    n = 0\n    while True:\n        yield n\n        n += 2"),
        ("g = evens()\nassert next(g) == 0 and next(g) == 2\nassert next(iter(evens())) == 0"),
    ),
    "generator ends": (
        ("def upto(n):\n    for i in range(n): yield i"),
        ("assert list(upto(3)) == [0, 1, 2] and sum(upto(4)) == 6\nassert next(upto(0), 'none') == 'none'"),
    ),
    "lambda of the tests": (
        "def both(f, x): return f(x), f(x + 1)",
        "assert both(lambda x: x * x, 3) == (9, 16)",
    ),
    "function of the answer": (
        ("def double(x): return 2 * x\ndef compose(f, g): return lambda x: f(g(x))"),
        "assert compose(double, double)(3) == 12",
    ),
    "key of sorted": (
        "def last(w): return w[-1]",
        "assert sorted(['ab', 'ca'], key=last) == ['ca', 'ab']",
    ),
    "prints": (
        "def greet(name): print('hi', name)",
        (
            "import io, contextlib\n"
            "out = io.StringIO()\n"
            "with contextlib.redirect_stdout(out):\n"
            "    greet('x')\n"
            "assert out.getvalue() == 'hi x\\n'"
        ),
    ),
    "unittest": (
        "def mul(a, b): return a * b",
        (
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test_mul(self):\n"
            "        self.assertEqual(mul(2, 3), 6)\n"
            "        self.assertAlmostEqual(mul(0.1, 3), 0.3)\n"
            "        with self.assertRaises(TypeError): mul(1)\n"
            "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()"
        ),
    ),
    "Decimal, Fraction and dates": (
        (
            "from decimal import Decimal\n"
            "from fractions import Fraction\n"
            "import datetime as d\n"
            "def f(): return Decimal('0.10'), Fraction(2, 6), d.date(2021, 3, 4), d.timedelta(1), d.time(2, 3)"
        ),
        (
            "import datetime\n"
            "from decimal import Decimal\n"
            "from fractions import Fraction\n"
            "a, b, c, d, e = f()\n"
            "assert a == Decimal('0.1') and b == Fraction(1, 3) and c == datetime.date(2021, 3, 4) and d == datetime.timedelta(days=1)\n"
            "assert e == datetime.time(2, 3) and c.year == 2021 and a + 1 == Decimal('1.1')"
        ),
    ),
    "namedtuple": (
        ("from collections import namedtuple\nSize = namedtuple('Size', 'width height')\ndef f(): return Size(3, 4)"),
        "assert f().width == 3 and f() == (3, 4) == Size(3, 4) and f()[1] == 4",
    ),
    "defaultdict": (
        (
            "from collections import defaultdict\n"
            "def f(words):\n"
            "    d = defaultdict(list)\n"
            "    for w in words: d[len(w)].append(w)\n"
            "    return d"
        ),
        "assert f(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']}",
    ),
    "deque, range and views": (
        ("from collections import deque\ndef f(): return deque([1, 2]), range(3), {'a': 1}.items(), {'a': 1}.keys()"),
        (
            "a, b, c, d = f()\n"
            "assert list(a) == [1, 2] and list(b) == [0, 1, 2] and b == range(3) and sorted(c) == [('a', 1)] and 'a' in d"
        ),
    ),
    "linked list": (
        (
            "class Node:\n"
            "    def __init__(self, x, rest=None): self.x, self.rest = x, rest\n"
            "def turned(node):\n"
            "    done = None\n"
            "    while node: node.rest, done, node = done, node, node.rest\n"
            "    return done"
        ),
        ("n = turned(Node(1, Node(2)))\nassert n.x == 2 and n.rest.x == 1 and n.rest.rest is None"),
    ),
    "large integer": (
        ("def power(a, b):\n    x = 1\n    for _ in range(b): x *= a\n    return x"),
        "assert power(7, 6000) == 7 ** 6000 and power(-7, 5001) == -(7 ** 5001)",
    ),
    "keys of any kind": (
        "def f(): return {1: 'a', (1, 2): 3, None: 4, 2.5: 5}",
        "assert f() == {1: 'a', (1, 2): 3, None: 4, 2.5: 5}",
    ),
    "changes an inner list": (
        "def f(m): m[1][0] = 7",
        ("m = [[1], [2]]\nf(m)\nassert m == [[1], [7]]"),
    ),
    "async": (
        "async def f(x): return x + 1",
        ("import asyncio\nassert asyncio.run(f(2)) == 3"),
    ),
    "long text": (
        "def f(n): return 'ab' * n",
        "assert len(f(3000)) == 6000 and f(2) == 'abab'",
    ),
    "patched input": (
        "def f(): return int(input()) * 2",
        ("import builtins\nbuiltins.input = lambda *text: '21'\nassert f() == 42"),
    ),
    "a name of Python": (
        "def sum(a, b): return a + b",
        "assert sum(10, 15) == 25",
    ),
    "a name of Python, handed on": (
        "def pow(a, b): return a ** b",
        ("def check(candidate):\n    assert candidate(2, 3) == 8\ncheck(pow)"),
    ),
    "math unimported": (
        ("import math\ndef f(x): return x*x"),
        "assert math.isclose(f(2),4.0)",
    ),
    "check candidate": (
        "def f(a): return a+1",
        ("def check(candidate):\n    assert candidate(1)==2\ncheck(f)"),
    ),
    "check f": (
        "def f(a): return a+1",
        ("def check(f):\n    assert f(1)==2\ncheck(f)"),
    ),
    "str(error)": (
        "def f(x): raise ValueError('bad %d'%x)",
        ("try:\n    f(3)\n    assert False\nexcept ValueError as e:\n    assert str(e)=='bad 3'"),
    ),
    "unicode": (
        "def f(b): return b.decode()",
        ("try:\n    f(b'\\xff')\n    assert False\nexcept UnicodeDecodeError as e:\n    assert e.start==0"),
    ),
    "own error attr": (
        (
            "class E(Exception):\n"
            "    def __init__(s,code): super().__init__('code %d'%code); s.code=code\n"
            "def f(): raise E(7)"
        ),
        ("try:\n    f()\n    assert False\nexcept E as e:\n    assert e.code==7 and str(e)=='code 7'"),
    ),
    "own error base": (
        ("class A(ValueError): pass\nclass B(A): pass\ndef f(): raise B('x')"),
        (
            "for k in (A,B,ValueError):\n"
            "    try:\n"
            "        f()\n"
            "        assert False\n"
            "    except k as e:\n"
            "        assert type(e) is B"
        ),
    ),
    "assertRaises": (
        "def f(x): raise KeyError(x)",
        (
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test(self):\n"
            "        with self.assertRaises(KeyError): f(1)\n"
            "        self.assertRaises(KeyError, f, 1)\n"
            "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()"
        ),
    ),
    "big arg": (
        "def f(x): return sum(x)",
        "assert f(list(range(60000)))==sum(range(60000))",
    ),
    "big sort": (
        "def f(x): x.sort()",
        ("x=list(range(30000,0,-1))\nf(x)\nassert x==list(range(1,30001))"),
    ),
    "alias row": (
        "def f(m): m[0].append(1)",
        ("r=[]\nm=[r,r]\nf(m)\nassert r==[1] and m[0] is m[1] is r"),
    ),
    "items append": (
        ("class S:\n    def __init__(s): s.items=[]"),
        ("s=S()\ns.items.append(4)\nassert s.items==[4]"),
    ),
    "list kept": (
        ("class S:\n    def __init__(s,xs): s.xs=xs\n    def add(s,x): s.xs.append(x)"),
        ("a=[1]\ns=S(a)\ns.add(2)\nassert a==[1,2]"),
    ),
    "list sub": (
        ("class Stack(list):\n    def push(s,x): s.append(x)\n    def peek(s): return s[-1]"),
        ("s=Stack()\ns.push(3)\ns.append(4)\nassert s==[3,4] and len(s)==2 and s.peek()==4 and s[0]==3"),
    ),
    "dict sub": (
        (
            "class D(dict):\n"
            "    def __getattr__(s,n): return s[n]\n"
            "    def __setitem__(s,k,v): super().__setitem__(k.lower(), v)"
        ),
        ("d=D()\nd['A']=1\nassert d['a']==1 and d.a==1 and d=={'a':1}"),
    ),
    "intenum": (
        ("from enum import IntEnum\nclass C(IntEnum):\n    RED=1\ndef f(): return C.RED"),
        "assert f()==1 and f() is C.RED and f().name=='RED'",
    ),
    "enum": (
        ("from enum import Enum\nclass C(Enum):\n    RED=1\n    B=2\ndef f(): return C.RED"),
        "assert f() is C.RED and f()==C.RED and f().value==1 and [c.name for c in C]==['RED','B'] and C['B'] is C.B and len(C)==2",
    ),
    "dataclass": (
        (
            "from __future__ import annotations\n"
            "from dataclasses import dataclass\n"
            "@dataclass(order=True, frozen=True)\n"
            "class P:\n"
            "    x: int\n"
            "    y: int = 0"
        ),
        (
            "assert P(1)==P(1,0) and P(1)<P(2) and repr(P(1))=='P(x=1, y=0)' and len({P(1),P(1),P(2)})==2\n"
            "try:\n"
            "    P(1).x=3\n"
            "    assert False\n"
            "except AttributeError:\n"
            "    pass"
        ),
    ),
    "namedtuple ops": (
        (
            "from typing import NamedTuple\n"
            "class V(NamedTuple):\n"
            "    x: int\n"
            "    y: int\n"
            "    def __add__(s,o): return V(s.x+o.x,s.y+o.y)"
        ),
        "assert V(1,2)+V(3,4)==V(4,6)==(4,6) and repr(V(1,2))=='V(x=1, y=2)' and V(1,2)._asdict()=={'x':1,'y':2} and V(1,2)[0]==1",
    ),
    "tests class": (
        ("def rev(h):\n    p=None\n    while h: h.next,p,h=p,h,h.next\n    return p"),
        (
            "class N:\n"
            "    def __init__(s,v,n=None): s.v=v; s.next=n\n"
            "r=rev(N(1,N(2)))\n"
            "assert r.v==2 and r.next.v==1 and r.next.next is None"
        ),
    ),
    "wraps": (
        (
            "import functools\n"
            "def deco(f):\n"
            "    @functools.wraps(f)\n"
            "    def g(*a,**k):\n"
            "        g.calls+=1\n"
            "        return f(*a,**k)\n"
            "    g.calls=0\n"
            "    return g"
        ),
        (
            "@deco\n"
            "def h(x, *, y=1):\n"
            "    'doc'\n"
            "    return x+y\n"
            "assert h(1,y=4)==5 and h.calls==1 and h.__name__=='h' and h.__doc__=='doc'"
        ),
    ),
    "memo recursion": (
        ("def memo(f):\n    c={}\n    def g(n):\n        if n not in c: c[n]=f(n)\n        return c[n]\n    return g"),
        ("@memo\ndef fib(n): return n if n<2 else fib(n-1)+fib(n-2)\nassert fib(40)==102334155"),
    ),
    "callback raises": (
        (
            "def retry(f,n):\n"
            "    for i in range(n):\n"
            "        try: return f()\n"
            "        except ValueError: pass\n"
            "    return None"
        ),
        (
            "calls=[]\n"
            "def bad():\n"
            "    calls.append(1)\n"
            "    if len(calls)<3: raise ValueError('x')\n"
            "    return 5\n"
            "assert retry(bad,5)==5\n"
            "assert len(calls)==3"
        ),
    ),
    "context manager": (
        (
            "from contextlib import contextmanager\n"
            "log=[]\n"
            "@contextmanager\n"
            "def cm(x):\n"
            "    log.append('in')\n"
            "    try: yield x\n"
            "    finally: log.append('out')"
        ),
        ("with cm(3) as v:\n    assert v==3\nassert log==['in','out']"),
    ),
    "suppress": (
        ("class S:\n    def __enter__(s): return s\n    def __exit__(s,t,e,b): return t is ValueError"),
        ("with S():\n    raise ValueError('x')\nassert isinstance(S(),S)"),
    ),
    "deepcopy": (
        ("class P:\n    def __init__(s): s.x=[1]"),
        ("import copy\np=P()\nq=copy.deepcopy(p)\nq.x.append(2)\nassert p.x==[1] and q.x==[1,2]"),
    ),
    "async gather": (
        ("import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x*2"),
        (
            "import asyncio\n"
            "async def main():\n"
            "    return await asyncio.gather(f(1),f(2))\n"
            "assert asyncio.run(main())==[2,4]"
        ),
    ),
    "mock": (
        "def f(cb): cb(3); return cb(4)",
        (
            "from unittest.mock import Mock\n"
            "m=Mock(return_value=7)\n"
            "assert f(m)==7\n"
            "m.assert_called_with(4)\n"
            "assert m.call_count==2"
        ),
    ),
    "patch input": (
        "def f(): return input('> ')",
        ("from unittest.mock import patch\nwith patch('builtins.input',return_value='q'):\n    assert f()=='q'"),
    ),
    "type name": (
        "class P: pass",
        "assert type(P()).__name__=='P' and type(P()) is P and P.__name__=='P'",
    ),
    "static": (
        (
            "class P:\n"
            "    n=0\n"
            "    @classmethod\n"
            "    def make(c): c.n+=1; return c()\n"
            "    @property\n"
            "    def v(s): return 5\n"
            "    @staticmethod\n"
            "    def s(x): return x"
        ),
        ("p=P.make()\nassert P.n==1 and p.v==5 and P.s(3)==3 and hasattr(p,'v') and not hasattr(p,'w')"),
    ),
    "counter": (
        ("from collections import Counter\ndef f(s): return Counter(s)"),
        ("from collections import Counter\nassert f('aab')==Counter('aba') and f('aab').most_common(1)==[('a',2)]"),
    ),
    "unimported counter": (
        ("from collections import Counter\ndef f(s): return Counter(s)"),
        "assert f('aab')==Counter('aba')",
    ),
    "deque eq": (
        (
            "from collections import deque,OrderedDict,defaultdict\n"
            "def f(): return deque([1],maxlen=3),OrderedDict(a=1),defaultdict(list)"
        ),
        (
            "from collections import deque,OrderedDict\n"
            "a,b,c=f()\n"
            "assert a==deque([1]) and a.maxlen==3 and b==OrderedDict(a=1) and c[5]==[]"
        ),
    ),
    "vector ops": (
        (
            "class V:\n"
            "    def __init__(s,x): s.x=x\n"
            "    def __mul__(s,k): return V(s.x*k)\n"
            "    __rmul__=__mul__\n"
            "    def __neg__(s): return V(-s.x)\n"
            "    def __eq__(s,o): return s.x==o.x\n"
            "    def __hash__(s): return hash(s.x)\n"
            "    def __getitem__(s,i): return s.x\n"
            "    def __len__(s): return 4\n"
            "    def __call__(s,y): return y\n"
            "    def __iadd__(s,o): s.x+=o.x; return s\n"
            "    def __add__(s,o): return V(s.x+o.x)\n"
            "    def __divmod__(s,o): return (1,2)"
        ),
        (
            "assert V(1)*3==V(3) and (3*V(2)).x==6 and -V(1)==V(-1) and V(1)[0]==1 and len(V(1))==4 and V(1)(5)==5\n"
            "assert {V(1):2}[V(1)]==2 and V(1)!=V(2)\n"
            "v=V(1)\n"
            "v+=V(2)\n"
            "assert v.x==3"
        ),
    ),
    "long printing": (
        ("def f(n):\n    for i in range(20000): print(i)\n    return n"),
        "assert f(3)==3",
    ),
    "default list": (
        ("def f(x,acc=[]):\n    acc.append(x)\n    return acc"),
        ("assert f(1)==[1]\nassert f(2)==[1,2]"),
    ),
    "global": (
        ("count=0\ndef f():\n    global count\n    count+=1"),
        ("f()\nassert count==1"),
    ),
    "identity": (
        "def f(x): return x",
        ("a=[1]\nassert f(a) is a\nassert f(None) is None"),
    ),
    "generator passed": (
        "def f(it): return sum(it)",
        ("assert f(x for x in [1,2,3])==6\nassert f(iter([1]))==1"),
    ),
    "builtin passed": (
        "def f(g,x): return g(x)",
        "assert f(len,'abc')==3 and f(str.upper,'a')=='A' and f(int,'4')==4",
    ),
    "exit code": (
        ("import sys\ndef f(): sys.exit(2)"),
        ("try:\n    f()\nexcept SystemExit as e:\n    assert e.code==2\nelse:\n    assert False"),
    ),
    "cycle": (
        ("def f():\n    a=[1]\n    a.append(a)\n    return a"),
        ("a=f()\nassert a[1] is a and a[0]==1"),
    ),
    "set of tuples": (
        "def f(): return {(1,2),(3,4)}, frozenset({1})",
        "assert f()==({(1,2),(3,4)},frozenset({1}))",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(name):
    assert passes(*RIGHT[name], LIMITS)


WRONG = {
    "pow": (
        "def pow(a,b): return 0",
        "assert pow(2,3)==8",
    ),
    "pow none": (
        "x=1",
        "assert pow(2,3)==8",
    ),
    "abs lies": (
        ("def abs(x): return 0\ndef f(x): return 0"),
        "assert abs(f(2)-4.0)<1e-6",
    ),
    "uncalled": (
        "def f(a): return 9",
        ("def test():\n    assert f(1)==2"),
    ),
    "skip": (
        ("import unittest\ndef f(x): raise unittest.SkipTest('x')"),
        (
            "import unittest\n"
            "class T(unittest.TestCase):\n"
            "    def test(self):\n"
            "        self.assertEqual(f(1),2)\n"
            "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()"
        ),
    ),
    "sub": (
        ("class A:\n    def __sub__(s,o): return 0.0\n    def __rsub__(s,o): return 0.0\ndef f(x): return A()"),
        "assert abs(f(2)-4.0)<1e-6",
    ),
    "sub2": (
        (
            "class A:\n"
            "    def __sub__(s,o): return s\n"
            "    def __mul__(s,o): return 0.0\n"
            "    __abs__=lambda s:0.0\n"
            "def f(x): return A()"
        ),
        "assert abs(f(2)-4.0)<1e-6",
    ),
    "sub3": (
        ("class A:\n    def __sub__(s,o): return s\n    def __mul__(s,o): return 0.0\ndef f(x): return A()"),
        ("d=f(2)-4.0\nassert d*d<1e-6"),
    ),
    "lt": (
        ("class A:\n    def __lt__(s,o): return True\n    __gt__=__le__=__ge__=__lt__\ndef f(x): return A()"),
        "assert f(2)<5",
    ),
    "stopiter call": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda c: f(c)==1,[1,2]))",
    ),
    "stopiter eq": (
        ("class A:\n    def __eq__(s,o): raise StopIteration\n    __hash__=None\ndef f(x): return A()"),
        "assert all(map(lambda c: f(c)==f(2),[1,2]))",
    ),
    "names leak": (
        (
            "import gc\n"
            "def f(n):\n"
            "    P=[o for o in gc.get_objects() if type(o).__name__=='Peer'][0]\n"
            "    try: return P.ask('names',None,['SECRET'])['SECRET']\n"
            "    except Exception: return 0"
        ),
        ("SECRET=12345\nassert f(1)==SECRET"),
    ),
    "globals leak": (
        ("def f(cb):\n    try: return cb.__globals__['SECRET']\n    except Exception as e: return 0"),
        ("SECRET=12345\nassert f(lambda: 0)==SECRET"),
    ),
    "frame leak": (
        ("def f(g):\n    next(g)\n    try: return g.gi_frame.f_globals['SECRET']\n    except Exception as e: return 0"),
        ("SECRET=12345\ndef g():\n    yield 1\n    yield 2\nassert f(g())==SECRET"),
    ),
    "dunder class": (
        ("class A:\n    __class__=int\n    def __eq__(s,o): return True\ndef f(x): return A()"),
        "assert f(1)==5",
    ),
    "np": (
        ("class np:\n    allclose=staticmethod(lambda *a: True)\ndef f(x): return 0"),
        "assert np.allclose(f(2),4)",
    ),
    "int that is equal to all": (
        (
            "class N(int):\n"
            "    __eq__ = lambda s, o: True\n"
            "    __ne__ = lambda s, o: False\n"
            "    __hash__ = int.__hash__\n"
            "def f(x): return N(1)"
        ),
        NUMBERS,
    ),
    "text that is equal to all": (
        (
            "class N(str):\n"
            "    __eq__ = lambda s, o: True\n"
            "    __hash__ = str.__hash__\n"
            "    startswith = lambda s, o: True\n"
            "def f(x): return N('x')"
        ),
        "assert f(2) == 'y'",
    ),
    "text that starts with all": (
        ("class N(str):\n    startswith = lambda s, o: True\ndef f(x): return N('x')"),
        "assert f(2).startswith('y')",
    ),
    "text that is false": (
        ("class N(str):\n    __bool__ = lambda s: False\ndef f(x): return N('x')"),
        "assert not f(2)",
    ),
    "int that is false": (
        ("class N(int):\n    __bool__ = lambda s: False\ndef f(x): return N(1)"),
        "assert not f(2)",
    ),
    "list that is equal to all": (
        ("class N(list):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\ndef f(x): return N()"),
        "assert f(2) == [5]",
    ),
    "list that is false": (
        ("class N(list):\n    __bool__ = lambda s: False\ndef f(x): return N([1])"),
        "assert not f(2)",
    ),
    "dict that is equal to all": (
        ("class N(dict):\n    __eq__ = lambda s, o: True\ndef f(x): return N()"),
        "assert f(2) == {5: 1}",
    ),
    "tuple that is equal to all": (
        ("class N(tuple):\n    __eq__ = lambda s, o: True\n    __hash__ = tuple.__hash__\ndef f(x): return N()"),
        "assert f(2) == (5,)",
    ),
    "float that subtracts to 0": (
        ("class N(float):\n    __sub__ = __rsub__ = lambda s, o: 0.0\ndef f(x): return N(1)"),
        "assert abs(f(2) - 4.0) < 1e-6",
    ),
    "equal within a list": (
        ("class N:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 5\ndef f(x): return [N()]"),
        "assert f(2) == [5]",
    ),
    "equal as a member": (
        ("class N:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 5\ndef f(x): return N()"),
        "assert f(2) in {5, 6} or f(2) in [5, 6]",
    ),
    "equal as an error": (
        ("class E(Exception):\n    __eq__ = lambda s, o: True\ndef f(x): return E()"),
        NUMBERS,
    ),
    "equal by its metaclass": (
        (
            "class M(type):\n"
            "    __eq__ = lambda s, o: True\n"
            "    __hash__ = type.__hash__\n"
            "class N(metaclass=M): pass\n"
            "def f(x): return N"
        ),
        NUMBERS,
    ),
    "equal as a remainder": (
        ("class N:\n    __mod__ = lambda s, o: 0\ndef f(x): return N()"),
        "assert f(2) % 3 == 0",
    ),
    "set that contains all": (
        (
            "class N(set):\n"
            "    issubset = __le__ = __contains__ = lambda s, o: True\n"
            "    symmetric_difference = lambda s, o: set()\n"
            "def f(x): return N([1])"
        ),
        ("x = f(2)\nassert x.issubset({5}) or x <= {5} or 5 in x or not x.symmetric_difference({5})"),
    ),
    "list that shows nothing": (
        (
            "class N(list):\n"
            "    __iter__ = lambda s: iter([])\n"
            "    __len__ = lambda s: 2\n"
            "    count = lambda s, x: 1\n"
            "def f(x): return N()"
        ),
        ("x = f(2)\nassert len(x) == 2 and all(a == b for a, b in zip(x, [1, 2]))"),
    ),
    "object that is below all": (
        ("class N:\n    __lt__ = __gt__ = lambda s, o: True\ndef f(x): return N()"),
        "assert f(2) < 5",
    ),
    "object whose power is 0": (
        ("class N:\n    __sub__ = lambda s, o: s\n    __pow__ = lambda s, o: 0.0\ndef f(x): return N()"),
        "assert (f(2) - 4.0) ** 2 < 1e-6",
    ),
    "Decimal of its own": (
        (
            "from decimal import Decimal\n"
            "class N(Decimal):\n"
            "    __eq__ = lambda s, o: True\n"
            "    __sub__ = lambda s, o: Decimal(0)\n"
            "def f(x): return N(1)"
        ),
        ("from decimal import Decimal\nassert f(2) == Decimal(5) or abs(f(2) - Decimal(5)) < 1"),
    ),
    "Fraction whose comparison is patched": (
        ("from fractions import Fraction\nFraction.__eq__ = lambda s, o: True\ndef f(x): return Fraction(1)"),
        ("from fractions import Fraction\nassert f(2) == Fraction(5)"),
    ),
    "changes a variable of the tests": (
        ("want = 5\ndef f(x):\n    global want\n    want = 0\n    return 0"),
        ("want = 5\ngot = f(2)\nassert got == want"),
    ),
    "StopIteration ends zip": (
        "def f(x): raise StopIteration",
        ("for got, want in zip(map(f, [1, 2]), [3, 4]):\n    assert got == want"),
    ),
    "derived StopIteration": (
        ("class E(StopIteration): pass\ndef f(x): raise E"),
        "assert all(map(lambda x: f(x) == 1, [1, 2]))",
    ),
    "StopIteration in a call back": (
        ("def f(g): raise StopIteration\n"),
        "assert all(map(lambda x: f(lambda: 1) == 1, [1, 2]))",
    ),
    "GeneratorExit": (
        "def f(x): raise GeneratorExit",
        NUMBERS,
    ),
    "SystemExit": (
        "def f(x): raise SystemExit(0)",
        NUMBERS,
    ),
    "KeyboardInterrupt": (
        "def f(x): raise KeyboardInterrupt",
        NUMBERS,
    ),
    "module of its own": (
        ("class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0"),
        "assert math.isclose(f(2), 4.0)",
    ),
    "helper of its own": (
        ("approx = lambda a, b: True\ndef f(x): return 0"),
        "assert approx(f(2), 4.0)",
    ),
    "builtins of its own": (
        ("def all(x): return True\ndef isinstance(a, b): return True\ndef len(x): return 3\ndef f(x): return 0"),
        "assert all([f(2) == 5]) and len(f(3)) == 3",
    ),
    "empties its argument": (
        ("def f(x):\n    x.clear()\n    return []"),
        ("x = [3, 1]\nassert f(x) == sorted(x)"),
    ),
    "settrace": (
        ("import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x): return 0"),
        NUMBERS,
    ),
    "patched json and the end's own class": (
        (
            "import json, sys\n"
            "json.dumps = lambda *a, **k: '{\"value\": true}'\n"
            "main = sys.modules['__main__']\n"
            "main.Peer.encode = lambda *a: 5\n"
            "def f(x): return 0"
        ),
        NUMBERS,
    ),
    "asks for names": (
        (
            "import sys\n"
            "def f(x):\n"
            "    p = sys.modules['__main__'].PEER\n"
            "    try: return p.ask('names', None, ['want'])['want']\n"
            "    except Exception as e: return 0"
        ),
        ("want = 8812\nassert f(2) == want"),
    ),
    "asks its own objects for their class": (
        ("import sys\ndef f(x):\n    try: return type(x).__init__.__globals__['want']\n    except Exception: return 0"),
        ("want = 8812\nclass A:\n    def __init__(self): self.x = 1\nassert f(A()) == want"),
    ),
    "a number that is nobody's": (
        (
            "import sys\n"
            "def f(x):\n"
            "    m = sys.modules['__main__']\n"
            "    p = m.PEER\n"
            "    for n in range(-9, 99):\n"
            "        r = m.Remote.__new__(m.Remote)\n"
            "        p.numbers[id(r)] = -n\n"
            "        try: return r.want\n"
            "        except Exception: pass\n"
            "    return 0"
        ),
        ("want = 8812\nassert f(2) == want"),
    ),
    "tells of changes in lists that it was not given": (
        (
            "import sys\n"
            "def f(x):\n"
            "    m = sys.modules['__main__']\n"
            "    p = m.PEER\n"
            '    changes = b\'[[-1, "list", null, [0]], [-2, "list", null, [0]]]\'\n'
            '    p.sent.write(b\'{"value": 0, "dropped": [], "names": {}, "changes": \' + changes + b\'}\\n\')\n'
            "    p.sent.flush()\n"
            "    return 0"
        ),
        ("want = [8812]\nassert f(2) == want[0]"),
    ),
    "names that were not asked for": (
        (
            "import sys\n"
            "def f(x):\n"
            "    p = sys.modules['__main__'].PEER\n"
            '    p.sent.write(b\'{"value": 0, "changes": [], "dropped": [], "names": {"want": 0}}\\n\')\n'
            "    p.sent.flush()\n"
            "    return 0"
        ),
        ("want = 8812\nassert f(2) == want"),
    ),
    "changes a method of the tests": (
        (
            "def f(o):\n"
            "    try: type(o).check = lambda *a: None\n"
            "    except Exception: pass\n"
            "    try: o.__class__ = dict\n"
            "    except Exception: pass\n"
            "    return 0"
        ),
        ("class Case:\n    def check(self, x): assert x == 5\nc = Case()\nc.check(f(c))"),
    ),
    "pickles": (
        (
            "class N:\n"
            "    def __reduce__(self): return (exec, ('raise SystemExit(0)',))\n"
            "    __reduce_ex__ = lambda s, v: s.__reduce__()\n"
            "def f(x): return N()"
        ),
        NUMBERS,
    ),
    "class that lies about its module": (
        (
            "import sys\n"
            "class Decimal:\n"
            "    __eq__ = lambda s, o: True\n"
            "Decimal.__module__ = 'decimal'\n"
            "import decimal\n"
            "decimal.Decimal = Decimal\n"
            "def f(x): return Decimal()"
        ),
        ("from decimal import Decimal\nassert f(2) == Decimal(5)"),
    ),
    "hash bomb": (
        "def f(x): return {i * (2 ** 61 - 1): 0 for i in range(500)}",
        NUMBERS,
    ),
    "value without end": (
        ("def f(x):\n    a = []\n    for i in range(10 ** 6): a.append(a[-50:])\n    return a"),
        NUMBERS,
    ),
    "deep value": (
        ("def f(x):\n    a = ()\n    for i in range(10 ** 5): a = (a,)\n    return a"),
        NUMBERS,
    ),
    "recursion through call backs": (
        "def f(g): return g(f)",
        ("def g(h): return h(g)\nassert f(g) == 5"),
    ),
    "flood of replies": (
        (
            "import os\n"
            "def f(x):\n"
            "    for n in range(3, 9):\n"
            "        try: os.write(n, b'x' * 200000)\n"
            "        except OSError: pass\n"
            "    return 0"
        ),
        NUMBERS,
    ),
    "closes its pipes": (
        ("import os\nos.closerange(0, 64)\ndef f(x): return 0"),
        NUMBERS,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_is_not_right_does_not_pass(name):
    assert passes(*WRONG[name], LIMITS) is False


ENDLESS = {
    "generator without end": (
        ("def f():\n    while True: yield 1"),
        "assert sum(f()) == 5",
    ),
    "call back without end": (
        ("def f(g):\n    while True: g()"),
        "assert f(lambda: 1) == 5",
    ),
    "sleeps after closing its pipes": (
        ("import os, time\nos.closerange(0, 64)\ntime.sleep(60)"),
        NUMBERS,
    ),
    "always one more attribute": (
        (
            "class N:\n"
            "    def __getattr__(self, name): return N()\n"
            "    def __len__(self): return 10 ** 9\n"
            "    def __getitem__(self, i): return N()\n"
            "def f(x): return N()"
        ),
        "assert [x for x in f(2)] == [5]",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_ends_at_the_deadline(name):
    began = time.monotonic()
    assert passes(*ENDLESS[name], SandboxLimits(cpu_seconds=1, wall_seconds=0.6, memory_megabytes=256)) is False
    assert time.monotonic() - began < 4


CASES = DATA.parent / "cases" / "code_reward.jsonl"
AS_PYTHON = {"abs error check with nan"}  # `not abs(nan - 2) > 1e-6` holds in Python as well


@pytest.mark.real_data
def test_the_shared_cases():
    if not CASES.is_file():
        pytest.skip(f"no cases in {CASES}")
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    wrong = [case["name"] for case in cases if passes(case["code"], case["test"], LIMITS) is not case["passes"]]
    assert set(wrong) <= AS_PYTHON


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```\n", "x = 1\n"),
        ("```python3.11\nx\n```\n```\ny\n```", "x\n"),
        ('```python title="a"\nx\n```\n```bash\ny\n```', "x\n"),
        ("```{.python .numbered}\nx\n```", "x\n"),
        ("~~~py\nx\n```\ny\n~~~\n", "x\n```\ny\n"),
        ("1. so:\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
        ("```\nx\n```\n```\ny\n```\n", "y\n"),
        ("```pythonic\nx\n```\n", "```pythonic\nx\n```\n"),
        ("```python\nx\n```\n```python\ncut off", "x\n"),
    ],
)
def test_the_code_of_a_response(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("test", "word"),
    [
        ("assert True", "no name of the answer"),
        ("import math\nx = 4\nassert math.sqrt(x) == 2", "no name of the answer"),
        ("def test_f():\n    assert f(1) == 2", "calls none"),
        ("assert approx(f(2), 4.0)", "'approx'"),
        ("assert np.allclose(f(2), 4.0)", "'np'"),
        ("assert f(2) == 4", ""),
        ("assert pow(2, 3) == 8", ""),
        ("assert math.isclose(f(2), 4.0)", ""),
        ("def approx(a, b):\n    return a == b\nassert approx(f(2), 4)", ""),
    ],
)
def test_tests_that_check_nothing_are_named_before_training(test, word):
    problem = code_module.tests_problem([test])
    assert word in problem and bool(problem) == bool(word)
