"""Models and data sets to try things on. Nothing here knows about workers.

model.py      the contract of a model, and the registry of models
models/       one file per model
layers.py     the few layers that torch.nn does not have
dataset.py    the contract of a data set, what a sample looks like, and the registry of data sets
datasets/     one file per data set
arrays.py     samples that are held in memory, fetched a batch at a time
crops.py      images that are read when asked for, scaled and cropped
image_tree.py images in a folder or a zip, by split and class
idx.py        the file format of MNIST and Fashion-MNIST
task.py       the loss and the count of right answers
locate.py     where files are looked for
extra.py      is a package installed that only some data sets need?
derived.py    arrays that took long to make, kept for the next time
options.py    checks of option values beyond their type
"""
