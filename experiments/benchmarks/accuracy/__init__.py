"""Trains ResNet-50, GPT-2 and BERT under every policy, and compares their accuracy with float32."""
