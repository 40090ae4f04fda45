"""Trains three models under every policy, and compares them with float32.

The models are ResNet-50, GPT-2 and BERT.
"""
