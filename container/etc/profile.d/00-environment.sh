# Debian's /etc/profile resets PATH in every login shell; the container's own comes back here (docker-stacks#2043).
if [ -r /run/pytorch-cuda/environment.sh ]; then
    . /run/pytorch-cuda/environment.sh
else
    export PATH=/opt/venv/bin:/home/dev/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin
fi
