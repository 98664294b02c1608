"""Each rule on the relatives of its page's two snippets: what else has to be found, and what looks
alike and is right. The pages themselves are tested where docs/ is (tests/host)."""

import ast
import textwrap

import pytest
from amptrain.check.checker import check
from amptrain.check.registry import RULES
from amptrain.check.source import Source

LOOP = """
import torch
from torch.amp import GradScaler

scaler = GradScaler("cuda")
for images, labels in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(images), labels)
    scaler.scale(loss).backward()
    {step}
"""
STEP = "scaler.step(optimizer); scaler.update()"


def numbers(code: str) -> list[str]:
    """The numbers of the rules that a script breaks, sorted."""
    return sorted(f.rule.number for f in check(Source("script.py", textwrap.dedent(code))))


def loop(step: str) -> str:
    """The training loop above with these statements, one a line, after backward."""
    return LOOP.format(step=textwrap.indent(step, "    ").strip())


WRONG = {
    "AMP001": [
        "from torch.cuda import amp\nwith amp.autocast(): pass",
        "import torch\n@torch.cuda.amp.autocast()\ndef forward(x): return x",
        "import torch\n@torch.cuda.amp.custom_fwd\ndef forward(ctx, x): return x",
        "import torch.cuda.amp as a\ns = a.GradScaler(enabled=False)",
    ],
    "AMP002": [
        "import torch\nwith torch.autocast('cuda'):\n    y = model(x.to(torch.float16))",
        "import torch\nwith torch.autocast('cuda'):\n    y = model(x.to('cuda', dtype=torch.half))",
        "import torch\n@torch.autocast('cuda')\ndef f(x): return net(x.bfloat16())",
        "import torch\nctx = torch.autocast('cuda') if amp else nullcontext()\n"
        "with ctx:\n    y = model(x.half())",
    ],
    "AMP003": [
        "import torch\nwith torch.autocast('cuda'):\n    y = q.float() @ k.float()",
        "import torch\nwith torch.autocast('cuda'):\n    y = torch.einsum('ij,jk', q.float(), k)",
        "import torch.nn.functional as F, torch\nwith torch.autocast('cuda'):\n"
        "    y = F.linear(x.float(), w)",
    ],
    "AMP004": [
        "import torch\nwith torch.autocast('cuda'):\n    loss = f(x)\n    loss.backward()",
        "import torch\nwith torch.no_grad(), torch.autocast('cuda'):\n    f(x).backward()",
        "import torch\ndef f(amp):\n    with torch.autocast('cuda', enabled=amp):\n"
        "        if amp:\n            scaler.scale(loss).backward()",
    ],
    "AMP005": [
        "import torch\nfrom torch import nn\ncriterion = nn.BCELoss()\n"
        "with torch.autocast('cuda'):\n    loss = criterion(p, y)",
        "import torch\nwith torch.autocast('cuda'):\n    loss = torch.nn.BCELoss()(p, y)",
        "import torch, torch.nn as nn\nclass T:\n  def __init__(self): self.loss = nn.BCELoss()\n"
        "  def f(self):\n    with torch.autocast('cuda'):\n      return self.loss(p, y)",
    ],
    "AMP006": [
        "import torch\nwith torch.autocast('cuda'):\n    y = x.softmax(-1).log()",
        "import torch, torch.nn.functional as F\ns = torch.amp.GradScaler()\n"
        "def f(x):\n    p = F.softmax(x, dim=1)\n    return torch.log(p)",
        "import torch\nwith torch.autocast('cuda'):\n    y = torch.log(torch.sigmoid(x))",
    ],
    "AMP010": [
        loop(f"clip_grad_norm_(model.parameters(), 1)\n{STEP}"),
        loop(f"if clip:\n    torch.nn.utils.clip_grad_value_(p, 1)\n{STEP}"),
        "def f(self):\n  self.scaler.scale(loss).backward()\n  nn.utils.clip_grad_norm_(p, 1)\n"
        "  self.scaler.step(self.opt)\n  self.scaler.unscale_(self.opt)\n  self.scaler.update()",
    ],
    "AMP011": [loop("scaler.step(optimizer)"), loop("if ok:\n    scaler.step(optimizer)")],
    "AMP012": [
        loop(f"{STEP}\noptimizer.step()"),
        loop(f"optimizer.step()\nif amp:\n    {STEP}"),
    ],
    "AMP013": [
        "import torch\ndtype = torch.bfloat16\ns = torch.amp.GradScaler('cuda', enabled=True)\n"
        "with torch.autocast('cuda', dtype=dtype): pass",
        "import torch\ns = torch.amp.GradScaler()\n"
        "with torch.autocast('cuda', torch.bfloat16): pass",
    ],
    "AMP014": [
        "import torch\nm = Net().cuda()\nm = m.half()\no = torch.optim.SGD(m.parameters(), lr=1)\n"
        "s = torch.amp.GradScaler()",
        "import torch\nm.to(torch.float16)\no = torch.optim.SGD(m.parameters(), lr=1)\n"
        "s = torch.amp.GradScaler()",
        "import torch\nm.to(device='cuda', dtype=torch.half)\n"
        "o = torch.optim.SGD([{'params': m.parameters()}], lr=1)\ns = torch.amp.GradScaler()",
    ],
    "AMP020": [
        loop(f"{STEP}\nscheduler.step()"),
        loop(f"{STEP}\nself.lr_scheduler.step()"),
        "import torch\nwarm = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1)\n"
        + loop(f"{STEP}\nwarm.step()"),
    ],
    "AMP021": [
        "while True:\n    loss.backward()\n    optimizer.step()",
        loop(STEP).replace("optimizer.zero_grad()", "pass"),
    ],
    "AMP022": [
        "for x in loader:\n    loss.backward()\n    self.opt.zero_grad()\n    self.opt.step()",
        loop(f"optimizer.zero_grad()\n{STEP}"),
    ],
    "AMP023": [
        "for epoch in range(3):\n    model.eval()\n    for x in loader:\n        y = model(x)",
        "def test(self):\n    self.net.eval()\n    for x in self.loader:\n        y = self.net(x)",
    ],
    "AMP024": [
        loop(f"{STEP}\nlosses.append(loss.item())"),
        loop(f"{STEP}\nbar.set_postfix(loss=loss.detach().item())"),
        "for x in loader.to(device):\n    total = a + b\n    total.backward()\n"
        "    log(total.item())",
        loop(f"{STEP}\ntotal += float(loss)"),
        loop(f"{STEP}\nlosses.append(loss.detach().cpu().numpy())"),
        loop(f"{STEP}\nlosses += loss.tolist()"),
    ],
    "AMP030": [
        "for i, x in enumerate(loader):\n    opt.zero_grad()\n    f(x).backward()\n"
        "    last = (i + 1) % n == 0\n    if last:\n        opt.step()",
        "for i, x in enumerate(loader):\n    scaler.scale(f(x)).backward()\n"
        "    if i % n == 0 or i == end:\n        scaler.step(opt)\n        scaler.update()\n"
        "    opt.zero_grad()",
        "count = 0\nfor x in loader:\n    opt.zero_grad()\n    f(x).backward()\n    count += 1\n"
        "    if count >= n:\n        opt.step()\n        count = 0",
    ],
    "AMP031": [
        "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(net)\n"
        "for i, x in enumerate(loader):\n    m(x).backward()\n    if i % 4 == 3:\n"
        "        opt.step()\n        opt.zero_grad()",
    ],
    "AMP032": [
        "for i, x in enumerate(loader):\n    scaler.scale(f(x)).backward()\n"
        "    if clip > 0:\n        scaler.unscale_(opt)\n        clip_grad_norm_(p, clip)\n"
        "    if (i + 1) % n == 0:\n        scaler.step(opt)\n        opt.zero_grad()\n"
        "        scaler.update()",
        "for i, x in enumerate(loader):\n    last = i % n == 0\n    if n > 1:\n"
        "        self.scaler.scale(f(x)).backward()\n        self.scaler.unscale_(self.opt)\n"
        "        if last:\n            self.scaler.step(self.opt)\n"
        "            self.opt.zero_grad()\n            self.scaler.update()\n"
        "    else:\n        self.scaler.unscale_(self.opt)\n        self.scaler.step(self.opt)",
    ],
    "AMP040": [
        "import torch\ns = torch.amp.GradScaler()\n"
        "torch.save({'model': m.state_dict(), 'optimizer': optimizer.state_dict()}, p)",
        "import torch\ns = torch.amp.GradScaler()\ndef save(self):\n"
        "    torch.save(dict(o=self.optimizer.state_dict()), p)",
    ],
    "AMP041": [
        "import torch\nx = torch.load(p)",
        "from torch import load\nx = load(p, 'cpu')",
        "import torch\ntry:\n    x = torch.load(p)\nexcept TypeError:\n    x = torch.load(q)",
        "import torch\nif fast:\n    x = torch.load(p, weights_only=True)\nelse:\n"
        "    x = torch.load(p)",
    ],
    "AMP050": [
        "from torch.utils.data.distributed import DistributedSampler as DS\ns = DS(data)\n"
        "for x in loader:\n    opt.zero_grad()\n    f(x).backward()\n    opt.step()",
    ],
    "AMP051": [
        "from torch.utils.data import DataLoader\nd = 'cuda:0'\nl = DataLoader(a, num_workers=n)",
        "from torch.utils import data\nl = data.DataLoader(a, num_workers=2)\nx.cuda()",
    ],
}
RIGHT = {
    "AMP001": [
        "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n"
        "    from torch.cuda.amp import GradScaler\ns = GradScaler()",
        "from mindspore.amp import autocast\nwith autocast(): pass",
        "import torch\nif torch.__version__ < '2':\n    c = torch.cuda.amp.autocast()",
    ],
    "AMP002": [
        "import torch\nwith torch.autocast('cuda'):\n    y = model(x)\nz = y.half()",
        "import torch\nwith torch.autocast('cuda', enabled=False):\n    y = model(x.half())",
        "import torch\nwith torch.autocast('cuda'):\n    def later(x): return x.half()",
        "import torch\nwith torch.autocast('cuda'):\n    kept.append((n, x.bfloat16().clone()))",
    ],
    "AMP003": [
        "import torch\nwith torch.autocast('cuda'):\n    loss = criterion(y.float(), labels)",
        "import torch\nwith torch.autocast('cuda'):\n    y = mask.float() @ x",
        "import torch\ny = q.float() @ k.float()",
    ],
    "AMP004": [
        "import torch\nwith torch.autocast('cuda', enabled=False):\n    loss.backward()",
        "import torch\nwith torch.autocast('cuda'):\n    loss = f(x)\nloss.backward()",
    ],
    "AMP005": [
        "import torch\nwith torch.autocast('cuda'):\n"
        "    with torch.autocast('cuda', enabled=False):\n"
        "        loss = torch.nn.functional.binary_cross_entropy(p.float(), y)",
        "import torch\nwith torch.autocast('cpu'):\n    l = torch.nn.BCELoss()(p, y)",
        "import torch\nloss = torch.nn.BCELoss()(p, y)",
    ],
    "AMP006": [
        "import torch\nwith torch.autocast('cuda'):\n    y = torch.log(x.softmax(-1) + 1e-4)",
        "import torch\ny = torch.log(x.softmax(-1))",
    ],
    "AMP010": [
        loop(f"if clip:\n    scaler.unscale_(optimizer)\n    clip_grad_norm_(p, 1)\n{STEP}"),
        "if scaler:\n  scaler.scale(l).backward()\n  scaler.step(o)\n  scaler.update()\n"
        "else:\n  l.backward()\n  clip_grad_norm_(p, 1)\n  o.step()",
        "l.backward()\nclip_grad_norm_(p, 1)\noptimizer.step()",
    ],
    "AMP011": [
        "class Amp:\n  def step(self):\n    self.scaler.unscale_(o)\n    self.scaler.step(o)\n"
        "  def after(self):\n    self.scaler.update()",
    ],
    "AMP012": [
        loop(f"if amp:\n    {STEP}\nelse:\n    optimizer.step()"),
        loop(f"if amp:\n    {STEP}\n    continue\noptimizer.step()"),
        loop(f"if amp:\n    {STEP}\nif not amp:\n    optimizer.step()"),
        loop(f"{STEP}\nother.step()"),
    ],
    "AMP013": [
        "import torch\ns = torch.amp.GradScaler('cuda', enabled=dtype == torch.float16)\n"
        "with torch.autocast('cuda', dtype=torch.bfloat16): pass",
        "import torch\ns = torch.amp.GradScaler()\nwith torch.autocast('cuda', dtype=chosen): pass",
        "import torch\ns = torch.amp.GradScaler()\nwith torch.autocast('cuda'): pass\n"
        "with torch.autocast('cuda', dtype=torch.bfloat16): pass",
    ],
    "AMP014": [
        "import torch\nvae.half()\no = torch.optim.SGD(unet.parameters(), lr=1)\n"
        "s = torch.amp.GradScaler()",
        "import torch\no = torch.optim.SGD(m.parameters(), lr=1)\ns = torch.amp.GradScaler()\n"
        "torch.save(m.half().state_dict(), p)",
        "import torch\nm.half()\no = torch.optim.SGD(m.parameters(), lr=1)",
    ],
    "AMP020": [
        "for epoch in e:\n"
        + textwrap.indent(loop(STEP), "    ")
        + "\n    optimizer.zero_grad()\n    scheduler.step()",
        loop(f"old = scaler.get_scale()\n{STEP}\nif scaler.get_scale() >= old: scheduler.step()"),
        loop(f"if amp:\n    {STEP}\nelse:\n    optimizer.step()\n    scheduler.step()"),
        loop(f"{STEP}\nif i % 500 == 0:\n    scheduler.step()"),
        loop(f"{STEP}\nscheduler.step(validate())"),
    ],
    "AMP021": [
        "import torch.distributed.autograd as da\nfor x in loader:\n"
        "    da.backward(c, [loss])\n    opt.step(c)",
        "for x in loader:\n    model.zero_grad()\n    loss.backward()\n    optimizer.step()",
        "for x in loader:\n    for p in ps: p.grad = None\n    loss.backward()\n"
        "    optimizer.step()",
        "loss.backward()\noptimizer.step()",
    ],
    "AMP022": [
        "for x in loader:\n    lg.backward()\n    og.step()\n    od.zero_grad()\n"
        "    ld.backward()\n    od.step()",
        "for x in loader:\n    opt.zero_grad()\n    loss.backward()\n    opt.step()",
    ],
    "AMP023": [
        "import torch\nmodel.eval()\nwith torch.no_grad():\n    for x in loader:\n"
        "        y = model(x)",
        "import torch\nmodel.eval()\nfor x in loader:\n    with torch.no_grad():\n"
        "        y = model(x)",
        "import torch\ndef v(model):\n    model.eval()\n    for x in loader: y = model(x)\n"
        "with torch.inference_mode():\n    v(model)",
        "model.eval()\nfor x in loader:\n    loss = model(x)\n    loss.backward()\n"
        "    attack(x.grad)",
        "model.eval()\nmodel.train()\nfor x in loader: y = model(x)",
    ],
    "AMP024": [
        "for x in batches:\n    loss.backward()\n    print(loss.item())",
        loop(f"{STEP}\nif step % 50 == 0:\n    print(loss.item())"),
        loop(f"{STEP}\nlr = float(schedule(step))\nlabels = labels.cpu().numpy()"),
        "for x in loader:\n    count += labels.sum().item()",
        "for epoch in e:\n    for x in loader:\n        loss.backward()\n    print(loss.item())",
    ],
    "AMP030": [
        "for i, x in enumerate(loader):\n    f(x).backward()\n    if i % 4 == 3:\n"
        "        opt.step()\n        opt.zero_grad()",
        "for i, x in enumerate(loader):\n    opt.zero_grad()\n    f(x).backward()\n    opt.step()\n"
        "    if i % 4 == 3: print(i)",
        "for i, x in enumerate(loader):\n    if i % 4 == 0: opt.zero_grad()\n    f(x).backward()\n"
        "    if i % 4 == 3: opt.step()",
    ],
    "AMP031": [
        "m = DDP(net)\nfor x in loader:\n    opt.zero_grad()\n    m(x).backward()\n    opt.step()",
        "m = net\nfor i, x in enumerate(loader):\n    m(x).backward()\n    if i % 4 == 3:\n"
        "        opt.step()\n        opt.zero_grad()",
    ],
    "AMP032": [
        "for i, x in enumerate(loader):\n    scaler.scale(f(x)).backward()\n"
        "    if (i + 1) % n:\n        continue\n    scaler.unscale_(opt)\n"
        "    scaler.step(opt)\n    opt.zero_grad()\n    scaler.update()",
        "for i, x in enumerate(loader):\n    scaler.scale(f(x)).backward()\n"
        "    sync = (i + 1) % n == 0\n    if sync:\n        scaler.unscale_(opt)\n"
        "    if sync:\n        scaler.step(opt)\n        opt.zero_grad()\n"
        "        scaler.update()",
        "for i, x in enumerate(loader):\n    scaler.scale(f(x)).backward()\n"
        "    scaler.unscale_(other)\n    if i % n == 0:\n        scaler.step(opt)\n"
        "        opt.zero_grad()\n        scaler.update()",
    ],
    "AMP040": [
        "import torch\ns = torch.amp.GradScaler()\ntorch.save(model.state_dict(), p)",
        "import torch\ntorch.save({'optimizer': optimizer.state_dict()}, p)",
        "import torch\nself.scaler = torch.amp.GradScaler()\n"
        "state = {'o': optimizer.state_dict()}\n"
        "if amp: state['scaler'] = self.scaler.state_dict()\ntorch.save(state, p)",
    ],
    "AMP041": [
        "import torch\nx = torch.load(p, weights_only=False)",
        "import torch\nx = torch.load(p, **options)",
        "import json\nx = json.load(p)",
        "from numpy import load\nx = load(p)",
        "import torch\ntry:\n    x = torch.load(p, weights_only=True)\nexcept TypeError:\n"
        "    x = torch.load(p)",
        "import torch\nif torch.__version__ >= '2.0':\n    x = torch.load(p, weights_only=True)\n"
        "else:\n    x = torch.load(p)",
    ],
    "AMP050": [
        "from torch.utils.data import DistributedSampler\n"
        "s = DistributedSampler(d, shuffle=False)\n"
        "for x in loader:\n    opt.zero_grad()\n    f(x).backward()\n    opt.step()",
        "from torch.utils.data import DistributedSampler\nval_sampler = DistributedSampler(d)\n"
        "for x in loader:\n    opt.zero_grad()\n    f(x).backward()\n    opt.step()",
    ],
    "AMP051": [
        "from torch.utils.data import DataLoader\nl = DataLoader(a, num_workers=0)\nx.cuda()",
        "from torch.utils.data import DataLoader\nl = DataLoader(a, num_workers=2)",
        "from torch.utils.data import DataLoader\nl = DataLoader(a, num_workers=2, **o)\nx.cuda()",
        "from torch_geometric.loader import DataLoader\nl = DataLoader(a, num_workers=2)\nx.cuda()",
    ],
}


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(number, code) for number, codes in table.items() for code in codes]


@pytest.mark.parametrize(("number", "code"), cases(WRONG))
def test_the_mistake_is_found(number: str, code: str) -> None:
    ast.parse(textwrap.dedent(code))
    assert number in numbers(code)


@pytest.mark.parametrize(("number", "code"), cases(RIGHT))
def test_what_is_right_is_left_alone(number: str, code: str) -> None:
    assert number not in numbers(code)


def test_every_rule_has_both() -> None:
    assert WRONG.keys() == RIGHT.keys() == RULES.keys()


def test_the_right_loop_breaks_no_rule() -> None:
    assert numbers(loop(STEP)) == []
