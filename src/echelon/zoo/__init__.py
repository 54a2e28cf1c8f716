"""Models and data sets to try things on. Nothing here knows about workers.

model.py       the contract of a model, and the registry of models
models/        one file per model
layers.py      layers that torch.nn does not have
dataset.py     the contract of a data set, the description of a sample, and the registry of data sets
datasets/      one file per data set
arrays.py      samples in memory, fetched a batch at a time
crops.py       images read on demand, scaled and cropped
image_tree.py  images in a folder or a zip, by split and class
idx.py         the file format of MNIST and Fashion-MNIST
task.py        the loss and the count of correct answers
locate.py      finds data files
extra.py       says which extra a missing package belongs to
derived.py     caches arrays that take long to make
options.py     checks the ranges of option values
"""
