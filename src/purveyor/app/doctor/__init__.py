"""`purveyor doctor`: looks at a machine and a deployment, and says what to do about what it finds."""
