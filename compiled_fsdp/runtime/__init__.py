"""What runs outside graphs: gates, which publish gradients."""
