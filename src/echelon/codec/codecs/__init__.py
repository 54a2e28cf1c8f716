"""The codecs, one file each."""
