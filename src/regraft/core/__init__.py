"""The engine: what to look for, what is safe, the edit, and the way back. Imports torch and itself only."""
