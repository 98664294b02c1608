"""What the doctor looks at, one file a subject. Every check reads; none changes anything but its
own probe file."""
