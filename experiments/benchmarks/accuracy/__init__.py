"""Trains ResNet-50, GPT-2 and BERT under every policy, and holds what comes out against float32."""
