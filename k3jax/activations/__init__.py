"""What backward needs: named leaves of a pullback, and the policy that says which of them are stored."""
