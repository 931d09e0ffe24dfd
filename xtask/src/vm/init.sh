#!/bin/busybox sh
# The first process of a guest: loads the modules, makes the host's root file system its own, runs the job, writes down how it
# ended and turns the machine off. The job directory, shared with the host, holds everything that differs between two boots.
/bin/busybox --install -s /bin
export PATH=/bin

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "/modules/$module" || echo "weft: module $module could not be loaded" >/dev/kmsg
done </modules/order

p9=trans=virtio,version=9p2000.L,msize=512000
# Uncached, so that the status is on the host by the time the machine is off.
mount -t 9p -o $p9,cache=none job /job
# What the guest writes outside the project stays in its own memory and is gone with it.
mount -t 9p -o $p9,cache=loose,ro host /host
mount -t tmpfs scratch /scratch
mkdir /scratch/upper /scratch/work
mount -t overlay -o lowerdir=/host,upperdir=/scratch/upper,workdir=/scratch/work root /root
for name in tmp run; do mount -t tmpfs $name /root/$name; done
for name in proc sys dev; do mount --move /$name /root/$name; done
mkdir -p /root/dev/shm /root/dev/pts /root/run/job
mount -t tmpfs shm /root/dev/shm
mount -t devpts pts /root/dev/pts
ln -s /proc/self/fd /root/dev/fd
mount --move /job /root/run/job
read -r project </root/run/job/project
mkdir -p "/root$project"
mount -t 9p -o $p9,cache=mmap project "/root$project"

for port in /root/sys/class/virtio-ports/*; do
    [ "$(cat "$port/name")" = output ] && output=/root/dev/${port##*/}
done
chroot /root /bin/bash /run/job/guest.sh </root/dev/null >"$output" 2>&1
echo $? >/root/run/job/status
sync
poweroff -f
