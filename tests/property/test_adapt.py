"""For any mix of lines: the edited script is Python, and one time is enough."""

from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from echelon.adapt.adapt import adapt
from echelon.adapt.text import ScriptText

# Pieces of scripts, in the order in which they may appear; each may be there or not.
PIECES = [
    "# coding: utf-8\n",
    '"""What it döes."""\n',
    "import os, torch\n",
    "import torch.distributed as dist\n",
    "from torch import nn; from torch.utils.data import DataLoader\n",
    "from torch.nn.parallel import DistributedDataParallel as DDP\n",
    "\n# ünïcode\n",
    "rank = int(os.environ['RANK'])\n",
    "os.environ['MASTER_ADDR'] = 'x'; os.environ['MASTER_PORT'] = '1'\n",
    "if rank >= 0:\n\tdist.init_process_group('gloo')\n",
    "torch.manual_seed(1 + rank)\n",
    "def helper(model):\n  torch.save(model, 'm.pt')  # é\n  return f'{dist.get_rank()}'\n",
    "loader = DataLoader(torch.ones(9, 2), batch_size=3)\n",
    "sampler = torch.utils.data.DistributedSampler(range(9))\n",
    "loader = DataLoader(torch.ones(9, 2), batch_size=3, sampler=sampler, shuffle=(sampler is None))\n",
    "model = nn.Linear(2, 1)\n",
    "model = nn.Linear(2, 1); other = nn.Linear(2, 1)\n",
    "model = DDP(model, device_ids=[rank])\n",
    "if rank:\n    model = DDP(\n        model,\n    )\n",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1) \\\n"
    "    if rank else torch.optim.Adam(model.parameters())\n",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # one\n",
    "if rank: optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "for epoch in range(1, 3): pass\n",
    "for epoch in range(1, 3):\n  total = 0\n  for x in loader:\n    loss = model(x).sum()\n"
    "    loss.backward()\n"
    "    optimizer.step(); total += loss.item()\n  print(epoch, total, '''\n# text''')\n",
    "for epoch in range(2):\n    for x in loader: model(x.cuda()).mean().backward(); optimizer.step()\n",
    "    \n\t\n",
    "helper(model)\n",
    "with open('m', 'wb') as file:\n    torch.save(model.module.state_dict(), file)\n    file.flush()\n",
    "torch.save({'a': '''\ntext'''}, 'b')\n",
    "torch.save(model.state_dict(), 'c')\ntorch.save(model.state_dict(), 'd')",
    "\ndist.destroy_process_group()",
]


@given(
    st.lists(st.booleans(), min_size=len(PIECES), max_size=len(PIECES)),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_an_edited_script_is_python_and_is_settled(chosen, end):
    source = "".join(piece for piece, there in zip(PIECES, chosen, strict=True) if there)
    first = adapt(ScriptText(source.replace("\n", end)), where="x.py")
    ast.parse(first.text)
    again = adapt(ScriptText(first.text), where="x.py")
    assert again.text == first.text
    assert not [one for one in first.findings if "would not run" in one.fix]
    if end == "\r\n":
        assert first.text.count("\n") == first.text.count("\r\n")
    for finding in first.findings:
        assert 1 <= finding.line <= max(1, len(first.before.lines))
        assert finding.level in ("change", "check", "note")


@given(st.lists(st.booleans(), min_size=len(PIECES), max_size=len(PIECES)))
def test_line_ends_do_not_change_what_is_found(chosen):
    source = "".join(piece for piece, there in zip(PIECES, chosen, strict=True) if there)
    plain = adapt(ScriptText(source), where="x.py")
    other = adapt(ScriptText(source.replace("\n", "\r\n")), where="x.py")
    assert other.text == plain.text.replace("\n", "\r\n")
    assert [one.what for one in other.findings] == [one.what for one in plain.findings]
