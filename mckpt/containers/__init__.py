"""The bytes of one file, without their meaning: safetensors, torch zip files, the index of
torch_dist, pickles.
"""
