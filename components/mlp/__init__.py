"""Feed-forward parts."""
