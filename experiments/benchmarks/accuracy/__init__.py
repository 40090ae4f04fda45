"""Train three models under every policy, and compare the results with float32.

The models are ResNet-50, GPT-2 and BERT.
"""
