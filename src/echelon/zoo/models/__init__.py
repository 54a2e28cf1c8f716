"""The models, one file each. `zoo/model.py` is their contract.

mlp.py               multilayer perceptron
lenet.py             LeNet-5, for small grey images
cnn.py               a small CNN, for 32 x 32 images
alexnet.py           AlexNet
vgg16.py             VGG-16
resnet18.py          ResNet-18
har_cnn.py           1-D CNN, for activity windows
char_lstm.py         character-level LSTM
char_transformer.py  character-level transformer
"""
