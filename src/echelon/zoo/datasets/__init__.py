"""The data sets, one file each. `zoo/dataset.py` is their contract.

digits.py         8 x 8 digits, included in scikit-learn
generated.py      random clusters
activity.py       generated motion-sensor windows
mnist.py          handwritten digits, from files
fashion_mnist.py  clothes, from files
cifar10.py        colour images, from files
image_folder.py   your own images
text.py           a text file, character by character
"""
