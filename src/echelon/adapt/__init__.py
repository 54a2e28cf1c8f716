"""Which lines of a training script change for several workers, and why?

adapt.py     text in, findings and edited text out
files.py     scripts on disk: read, and written atomically
text.py      positions: which characters a node of the syntax tree stands on
changes.py   changes of nodes, put together into one new text
patch.py     the unified diff
tree.py      names, calls, and what runs when a statement runs
things.py    which variables hold models, optimizers and loaders
roles.py     which loaders train, which evaluate
home.py      where model, optimizer and loader are made, and prepared
losses.py    whether the loss is a mean or a sum
ranks.py     what runs on one worker only
reading.py   all of this about one script, as rules see it
finding.py   what a rule says
rule.py      the contract of a rule, and the registry
rewrite.py   small edits that several rules make
mapping.py   scripts of other libraries, attribute by attribute
joining.py   where the script joins the run
rules/       one file per rule
"""
