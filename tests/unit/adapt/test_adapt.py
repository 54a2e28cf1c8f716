"""Whole scripts: what is edited, what is left, and that it is settled after one time."""

from __future__ import annotations

import ast
import textwrap

import pytest

import shapes
from echelon.adapt.adapt import Adapted, adapt
from echelon.adapt.text import ScriptText
from echelon.errors import ConfigError


def _adapt(source: str) -> Adapted:
    return adapt(ScriptText(textwrap.dedent(source)), where="train.py")


def _new_lines(source: str) -> list[str]:
    """The lines that the edit adds, without their indentation."""
    result = _adapt(source)
    before = result.before.text.splitlines()
    return [line.strip() for line in result.text.splitlines() if line not in before]


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_script_is_settled_after_one_time(name):
    first = _adapt(shapes.SHAPES[name])
    assert first.changed
    again = _adapt(first.text)
    assert again.text == first.text
    assert [one for one in again.findings if one.level != "note"] == []


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_line_ends_and_indentation_of_a_script_stay(name):
    plain = _adapt(shapes.SHAPES[name]).text
    other = adapt(ScriptText(shapes.SHAPES[name].replace("\n", "\r\n")), where="train.py").text
    assert other == plain.replace("\n", "\r\n")
    tabs = shapes.SHAPES[name].replace("    ", "\t")
    assert adapt(ScriptText(tabs), where="train.py").text == plain.replace("    ", "\t")


def test_a_flat_script_needs_four_lines():
    assert _new_lines(shapes.FLAT) == [
        "import echelon",
        "session = echelon.join()",
        "model, optimizer, loader = session.prepare(model, optimizer, loader)",
        "for epoch in session.epochs(3):",
        "if session.is_leader:",
        'torch.save(model.state_dict(), "model.pt")',
    ]


def test_what_lives_in_functions_is_prepared_where_it_is_made():
    result = _adapt(shapes.FUNCTIONS)
    lines = result.text.splitlines()
    join = lines.index("    session = echelon.join()")
    assert lines[join - 1].strip() == "args = parser.parse_args()"
    prepare = lines.index(
        "    model, optimizer, train_loader = session.prepare(model, optimizer, train_loader)"
    )
    assert lines[prepare - 1].strip().startswith("optimizer = ")
    assert "        epoch += 1  # the session counts from 0" in lines
    assert not result.needs_a_person


def test_sums_are_prepared_as_sums_and_added_up_over_workers():
    added = _new_lines(shapes.SUMS)
    assert (
        'model, optimizer, train_loader = session.prepare(model, optimizer, train_loader, loss="sum")'
        in added
    )
    assert "train_loss = session.all_reduce(torch.tensor(train_loss, dtype=torch.float64)).item()" in added


def test_several_models_and_optimizers_are_prepared_together_and_a_long_line_is_broken():
    text = _adapt(shapes.TWO_MODELS).text
    names = "judge, maker, optimizer_judge, optimizer_maker, dataloader"
    assert f"{names} = session.prepare(\n    {names}\n)\n" in text
    assert text.count("if session.is_leader:\n") == 1


def test_in_a_class_the_session_is_an_attribute():
    text = _adapt(shapes.TRAINER).text
    assert "        self.session = echelon.join()\n" in text
    assert "self.model, self.optimizer, self.loader = self.session.prepare(" in text
    taken = shapes.TRAINER.replace("self.steps = steps", "self.steps = self.session = steps")
    assert "        self.echelon_session = echelon.join()\n" in _adapt(taken).text


def test_a_method_that_runs_before_the_session_is_made_does_not_use_it():
    source = """
    import torch
    from torch.utils.data import DataLoader

    class Trainer:
        def __init__(self, model):
            self.model = model
            self.device = "cuda" if torch.cuda.is_available() else "cpu"

        def save(self):
            torch.save(self.model, "m.pt")

        def run(self, data):
            model = self.model
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(data, batch_size=3)
            for epoch in range(2):
                for x in loader:
                    model(x.to(self.device)).mean().backward()
                    self.optimizer.step()
                self.save()
    """
    text = _adapt(source).text
    assert 'self.device = "cuda" if' in text
    assert "        self.session = echelon.join()\n        model = self.model\n" in text
    assert "        if self.session.is_leader:\n            torch.save" in text


def test_a_class_attribute_and_a_default_do_not_use_the_session():
    choice = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'
    source = shapes.FLAT.replace(
        "torch.manual_seed(0)\n",
        f"class Settings:\n    device = {choice}\n\ndef move(x, device={choice}):\n    return x\n\n"
        "torch.manual_seed(0)\n",
    )
    result = _adapt(source)
    assert result.text.count(choice) == 2
    assert "session.device" not in result.text
    assert not result.needs_a_person


def test_what_is_made_under_a_condition_is_prepared_under_it():
    added = _new_lines(shapes.OWN_DATA)
    assert "optimizer = session.prepare(optimizer)" in added
    assert "model = session.prepare(model)" in added
    assert "session.barrier()" in added


def test_nothing_of_torch_distributed_is_left_in_a_ddp_script():
    text = _adapt(shapes.DDP).text
    left = [line for line in text.splitlines() if "import" not in line]
    assert not [
        line for line in left if "dist." in line or "DDP" in line or "MASTER" in line or "ampler" in line
    ]
    assert 'batch="per-worker"' in text


def test_a_session_keeps_the_name_of_what_it_replaces():
    text = _adapt(shapes.ACCELERATE).text
    assert "accelerator = echelon.join()" in text
    assert "for epoch in accelerator.epochs(2):" in text
    assert "accelerator.print(" in text
    assert "from accelerate" not in text
    assert "import lightning" not in _adapt(shapes.FABRIC).text


def test_a_session_is_known_under_another_name_in_another_function():
    source = shapes.ACCELERATE.replace("def evaluate(accelerator,", "def evaluate(it,")
    source = source.replace("accelerator.device", "it.device").replace("accelerator.gather", "it.gather")
    source = source.replace("    accelerator.print(", "    it.wait_for_everyone()\n    it.print(")
    result = _adapt(source)
    assert "    it.barrier()\n    it.print(" in result.text
    assert not result.needs_a_person


def test_a_name_that_is_taken_is_not_used_for_the_session():
    text = _adapt(shapes.FLAT.replace("right", "session")).text
    assert "echelon_session = echelon.join()" in text
    ast.parse(text)


def test_an_adapted_script_is_left_alone():
    result = _adapt(_adapt(shapes.FLAT).text)
    assert not result.changed
    assert not result.findings


def test_a_comment_a_docstring_and_odd_spacing_stay():
    source = '#!/usr/bin/env python\n"""What it does."""\n' + shapes.FLAT.replace(
        "optimizer = torch", "optimizer  =  torch  # the\n# optimizer\noptimizer = torch"
    ).replace("optimizer  =  torch  # the\n", "# the\n")
    text = _adapt(source).text
    assert text.startswith('#!/usr/bin/env python\n"""What it does."""\nimport torch\n')
    assert "# the\n# optimizer\noptimizer = torch" in text


MADE_ELSEWHERE = """
import torch
from torch.utils.data import DataLoader

def build(data):
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def loaders(data):
    return DataLoader(data, batch_size=4), DataLoader(data, batch_size=8)

def main(data):
    model, optimizer = build(data)
    train, valid = loaders(data)
    for step in range(3):
        for x, y in train:
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            print(sum(model(x).sum() for x, y in valid))
"""


def test_things_that_functions_return_are_prepared_where_they_arrive():
    added = _new_lines(MADE_ELSEWHERE)
    assert "model, optimizer, train = session.prepare(model, optimizer, train)" in added
    assert "for step in session.epochs(3):" in added


def test_a_loader_that_is_read_before_the_optimizer_is_there_is_prepared_first():
    source = shapes.FLAT.replace("model = nn", "batches = iter(loader)\nmodel = nn")
    lines = _adapt(source).text.splitlines()
    assert lines[lines.index("batches = iter(loader)") - 1] == "loader = session.prepare(loader)"


def test_a_loader_with_a_sampler_is_prepared_before_its_length_is_taken():
    source = shapes.DDP.replace("    layer = nn", "    steps = len(loader) * 2\n    layer = nn")
    lines = [line.strip() for line in _adapt(source).text.splitlines()]
    at = lines.index("steps = len(loader) * 2")
    assert lines[at - 1] == 'loader = session.prepare(loader, batch="per-worker")'


def test_a_look_at_the_first_batch_changes_nothing():
    source = shapes.FLAT.replace("model = nn", "first = next(iter(loader))\nmodel = nn")
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in _new_lines(source)


def test_a_loader_that_a_class_of_the_script_makes_is_prepared_there():
    source = """
    import torch
    from torch.utils.data import DataLoader

    class Endless:
        def __init__(self, data):
            self.loader = DataLoader(data, batch_size=4)
            self.batches = iter(self.loader)

        def next(self):
            return next(self.batches)

    if __name__ == "__main__":
        data = torch.utils.data.TensorDataset(torch.ones(9, 2))
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = Endless(data)
        for step in range(3):
            (x,) = batches.next()
            model(x).mean().backward()
            optimizer.step()
    """
    result = _adapt(source)
    assert "        self.loader = session.prepare(self.loader)\n" in result.text
    assert "        for step in range(3):" in textwrap.indent(result.text, "    ")
    assert not result.needs_a_person


def test_parameters_of_a_function_can_be_prepared_in_it():
    source = """
    import torch
    from torch.utils.data import DataLoader

    def train(model, loader, epochs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(epochs):
            for x in loader:
                model(x).mean().backward()
                optimizer.step()

    train(torch.nn.Linear(2, 1), DataLoader(torch.ones(9, 2), batch_size=3), 2)
    """
    added = _new_lines(source)
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in added


def test_names_that_a_function_declares_global_can_be_prepared_in_it():
    source = """
    import torch
    from torch.utils.data import *

    def main():
        global model, loader
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.ones(9, 2), batch_size=3)
        for epoch in range(2):
            for x in loader:
                model(x).mean().backward()
                optimizer.step()

    main()
    """
    assert "model, optimizer, loader = session.prepare(model, optimizer, loader)" in _new_lines(source)


def test_the_accelerator_can_be_an_attribute():
    source = """
    from accelerate import Accelerator

    class Runner:
        def __init__(self, model, loader):
            self.accelerator = Accelerator()
            self.model, self.loader = self.accelerator.prepare(model, loader)

        def run(self):
            for epoch in range(2):
                for x in self.loader:
                    self.accelerator.backward(self.model(x).mean())
    """
    assert _new_lines(source) == [
        "import echelon",
        "self.accelerator = echelon.join()",
        'self.model, self.loader = self.accelerator.prepare(model, loader, batch="per-worker")',
        "for epoch in self.accelerator.epochs(2):",
        "self.model(x).mean().backward()",
    ]


UNCERTAIN = {
    "made inside the loop": """
    import torch
    from torch.utils.data import DataLoader
    for fold in range(5):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.ones(9, 2), batch_size=3)
        for x in loader:
            model(x).mean().backward()
            optimizer.step()
    """,
    "called more than once": """
    import torch
    from torch.utils.data import DataLoader
    def fit(rate):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        loader = DataLoader(torch.ones(9, 2), batch_size=3)
        for x in loader:
            model(x).mean().backward()
            optimizer.step()
    fit(0.1)
    fit(0.2)
    """,
    "not known to come from a loader in a variable": """
    import torch
    from torch.utils.data import DataLoader
    loaders = {name: DataLoader(torch.ones(9, 2), batch_size=3) for name in ("train", "val")}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for phase in ("train", "val"):
            for x in loaders[phase]:
                loss = model(x).mean()
                if phase == "train":
                    loss.backward()
                    optimizer.step()
    """,
    "not a plain variable": """
    import torch
    nets = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *nets[0].parameters()], lr=0.1)
    for step in range(3):
        (model(torch.ones(1, 2)) + nets[0](torch.ones(1, 2))).mean().backward()
        optimizer.step()
    """,
    "no variable is certain to be the model": """
    import torch
    weights = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for step in range(3):
        weights.sum().backward()
        optimizer.step()
    """,
    "made in several functions": """
    import torch
    from torch.utils.data import DataLoader
    def first():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(torch.ones(9, 2), batch_size=3):
            model(x).mean().backward()
            optimizer.step()
    def second():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(torch.ones(9, 2), batch_size=3):
            model(x).mean().backward()
            optimizer.step()
    """,
}


@pytest.mark.parametrize("reason", UNCERTAIN)
def test_what_is_not_certain_is_said_and_not_edited(reason):
    result = _adapt(UNCERTAIN[reason])
    assert not result.changed
    assert result.needs_a_person
    assert any(reason in one.what for one in result.findings if one.rule == "prepare")


def test_a_line_with_other_code_on_it_is_left_to_a_person():
    source = shapes.FLAT.replace("lr=0.1, momentum=0.9)\n", "lr=0.1); criterion = nn.MSELoss()\n")
    result = _adapt(source)
    (finding,) = [one for one in result.findings if one.rule == "prepare"]
    assert (finding.level, finding.line) == ("check", 10)
    assert "not edited" in finding.fix
    assert not result.changed  # without prepare the other edits would train wrongly
    assert {one.level for one in result.findings} == {"check"}


def test_a_model_that_is_divided_among_workers_is_not_edited():
    result = _adapt(shapes.FLAT.replace("import torch\n", "import torch\nimport deepspeed\n", 1))
    assert not result.changed
    assert result.needs_a_person


def test_functions_that_call_each_other_are_read():
    source = "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\nmodel = f(1)\nf(model).backward()\n"
    assert _adapt(source).needs_a_person


def test_a_loss_of_a_thousand_terms_is_refused_without_a_traceback():
    with pytest.raises(ConfigError, match="nested too deeply"):
        _adapt(f"loss = {' + '.join(['x'] * 2000)}\nloss.backward()\n")


def test_a_script_that_is_not_python_is_an_error_with_its_line():
    with pytest.raises(ConfigError, match="not valid Python") as caught:
        _adapt("import torch\nfor x in:\n    pass\n")
    assert caught.value.where == "train.py, line 2"


@pytest.mark.parametrize("source", ["", "x = 1\n", "\n\n# nothing\n", "'''text'''"])
def test_a_script_without_training_says_so(source):
    result = _adapt(source)
    assert not result.changed
    assert [one.rule for one in result.findings] == ["own-loop"]
