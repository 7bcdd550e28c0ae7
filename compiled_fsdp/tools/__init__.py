"""What people look with: the command, `explain`, profiles, timelines, tables. Nothing else imports it."""
