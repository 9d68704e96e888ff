"""What is said as memory runs out."""
